# The end of every Slurm script, sourced (examples/slurm) or written into it (launch.sbatch of the tuner): torchrun on every node of
# the job, and what makes a job that was stopped go on by itself.
#
# Slurm sends SIGUSR1 to the batch script some time before the limit (`#SBATCH --signal`), or when it preempts the job and the
# cluster has `SlurmctldParameters=preempt_send_user_signal`. The ranks finish their step, save and end; the job returns to the queue and,
# started again, loads what it saved. A job that is requeued without warning goes on from the last `--save-interval`.
set -euo pipefail
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it over from sbatch

# Ranks that torchrun starts again must not meet in the store of those that died (github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# One torchrun per node. They meet on the first node, at a port and under an id that no other job has, nor an earlier start of
# this one. SIGUSR1 reaches every process of the step: torchrun and ranks that still start up ignore it, ranks that train obey.
# Where --gres asks for GPUs and not --gpus-per-node, GPUS says how many: an exclusive node shows all that it has.
gpus=${SLURM_GPUS_PER_NODE:-${GPUS:-$SLURM_GPUS_ON_NODE}}
launcher=(
    --nnodes "${#nodes[@]}" --nproc-per-node "${gpus##*:}" --max-restarts "$RESTARTS"
    --rdzv-backend c10d --rdzv-endpoint "${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"
    --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
)
stopping=(--exit-signal-handler --exit-signal "$(kill -l USR1)" --save "$RUN" --load "$RUN")
on_node='trap "" USR1; exec '"$CONTAINER $PYTHON"' -m torch.distributed.run --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@"'
# With pyxis, CONTAINER_IMAGE is what the ranks run in; they see the working folder, and CONTAINER_MOUNTS.
pyxis=()
if [[ ${CONTAINER_IMAGE:-} ]]; then
    pyxis=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD")
    pyxis+=(--container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi
srun --kill-on-bad-exit=1 "${pyxis[@]}" \
    bash -c "$on_node" bash "${launcher[@]}" "${PROGRAM:-pretrain_moe.py}" "$@" "${stopping[@]}" &
step=$!

# Said again and again, in case ranks were still starting up.
stop() { while kill -USR1 "$step" 2>/dev/null; do sleep 10; done; }
stopped=
trap 'stopped=yes; stop &' USR1

status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends `wait`, not the step
    wait "$step" && status=0 || status=$?
done
# Preempted on a cluster that gives SIGTERM and a grace time instead: torchrun has ended, nothing was saved.
if [[ $status != 0 && $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    stopped=yes
fi
if [[ $stopped ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
