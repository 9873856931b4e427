#!/bin/bash
# A launch script as users of Megatron-LM write them; read by test_import_flags.py, never run.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=2
MASTER_ADDR=${MASTER_ADDR:-"localhost"}
NNODES=${SLURM_NNODES:-"1"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DATA_PATH=$3
TOKENIZER_MODEL=/workspace/tokenizer.model

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
)
MODEL_ARGS=(
    --num-layers ${LAYERS:-4}
    --hidden-size 256   # width
    --num-attention-heads 4
    --seq-length 256
    --max-position-embeddings 2048
    --position-embedding-type rope
    --no-position-embedding
)
MOE_ARGS=(
    --num-experts 8
#    --moe-grouped-gemm
    --moe-layer-freq "([0]*1+[1]*3)"
)
DATA_ARGS="--tokenizer-type Llama2Tokenizer \
    --tokenizer-model ${TOKENIZER_MODEL} \
    --data-path $DATA_PATH"
TRAINING_ARGS="
    --micro-batch-size 1
    --global-batch-size $((WORLD_SIZE * 4))
    --lr 1e-4
    --train-iters 7
"
LOGGING_ARGS=(
    --eval-iters 10 \
    #--save $CHECKPOINT_PATH \
    --no-load-optim
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT:-"Mixtral"}
    )
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${MOE_ARGS[@]} \
    # a comment in between
    $DATA_ARGS \
    ${TRAINING_ARGS} \
    ${LOGGING_ARGS[@]} 2>&1 | tee log.txt
