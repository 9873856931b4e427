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
# this one. Where --gres asks for GPUs and not --gpus-per-node, GPUS says how many: an exclusive node shows all that it has.
gpus=${SLURM_GPUS_PER_NODE:-${GPUS:-$SLURM_GPUS_ON_NODE}}
launcher=(
    --nnodes "${#nodes[@]}" --nproc-per-node "${gpus##*:}"
    --rdzv-backend c10d --rdzv-endpoint "${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"
)
for word; do
    case $word in
    --save | --save=* | --load | --load=*)
        echo "error: $word: the script says where the run saves and what it loads; set RUN or LOAD (--export=ALL,LOAD=...)" >&2
        exit 2
        ;;
    esac
done
stopping=(--exit-signal-handler --exit-signal "$(kill -l USR1)" --save "$RUN")
# Slurm signals a node's task alone where processes are tracked by cgroups, which is the default, and all of them where not. The task
# is this shell, which passes SIGUSR1 on to the ranks that have a handler for it: torchrun, and ranks that still start up, ignore it.
on_node='
below() { local pid; for pid in $(cat /proc/"$1"/task/*/children 2>/dev/null); do echo "$pid"; below "$pid"; done; }
is_training() {
    local caught
    grep -qz "^LOCAL_RANK=" /proc/"$1"/environ 2>/dev/null && caught=$(grep "^SigCgt:" /proc/"$1"/status 2>/dev/null) &&
        (( 0x${caught##*[[:space:]]} & 1 << ($(kill -l USR1) - 1) ))
}
pass_on() { local pid; for pid in $(below "$launcher"); do if is_training "$pid"; then kill -USR1 "$pid" 2>/dev/null; fi; done; }
trap "" USR1
'"$CONTAINER $PYTHON"' -m torch.distributed.run --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@" &
launcher=$!
trap pass_on USR1
trap "kill -TERM $launcher" TERM
wait "$launcher"; status=$?
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; status=$?; done # a signal ends `wait`, not torchrun
exit "$status"
'
# With pyxis, CONTAINER_IMAGE is what the ranks run in; they see the working folder, and CONTAINER_MOUNTS.
pyxis=()
if [[ ${CONTAINER_IMAGE:-} ]]; then
    pyxis=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD")
    pyxis+=(--container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi
# Said again and again, in case ranks were still starting up.
stop() { while kill -USR1 "$step" 2>/dev/null; do sleep 10; done; }
stopped=
trap 'stopped=yes; stop &' USR1
# A step of the job: which start of it, how often torchrun starts failed ranks again, what they load, and the program's words.
run_step() {
    local start=$1 restarts=$2 from=$3
    shift 3
    srun --kill-on-bad-exit=1 "${pyxis[@]}" bash -c "$on_node" bash "${launcher[@]}" \
        --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$start" --max-restarts "$restarts" \
        "${PROGRAM:-pretrain_moe.py}" "$@" "${stopping[@]}" --load "$from" &
    step=$! status=0
    wait "$step" || status=$?
    while kill -0 "$step" 2>/dev/null; do # a signal ends `wait`, not the step
        wait "$step" && status=0 || status=$?
    done
}
has_saved() { compgen -G "$RUN/step-*" > /dev/null || [[ -e $RUN/latest_checkpointed_iteration.txt ]]; }

# torchrun starts failed ranks again with the words that they had. While these name LOAD, where the run begins, the script does it:
# what has been saved meanwhile goes on.
for ((start = 0, left = RESTARTS; ; start += 1, left -= 1)); do
    if [[ ! ${LOAD:-} ]] || has_saved; then
        run_step "$start" "$left" "$RUN" "$@"
        break
    fi
    run_step "$start" 0 "$LOAD" "$@" ${FIRST:-}
    if [[ $status == 0 || $stopped || $left -le 0 ]]; then
        break
    fi
done
# Preempted on a cluster that gives SIGTERM and a grace time instead: torchrun has ended, nothing was saved.
if [[ $status != 0 && $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    stopped=yes
fi
if [[ $stopped ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
