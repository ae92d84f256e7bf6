cd -- "$work_folder"
meeting="$run_folder/.slurm/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
mkdir -p -- "$meeting"
newest_checkpoint() { cat -- "$run_folder/checkpoints/latest" 2>/dev/null || true; }
before=$(newest_checkpoint)
rc=0
# Write each step to the log when it is done.
export PYTHONUNBUFFERED=1

if ((nodes > 1)); then
  # Start a task that joins Ray on each node; the first one runs the command.
  joined=("$python" -m nemo_rl_lite.slurm.node --meeting "$meeting" --logs "$run_folder/logs"
    "${node_options[@]}" -- "${command[@]}")
else
  # The launcher starts its own Ray.
  joined=("${command[@]}")
fi

# This shell receives Slurm's signal before the end of the job (and `scancel --batch --signal=USR1`) and forwards it; the
# launcher ends its current step, saves and exits with 75. Other signals (SIGTERM) reach the launcher directly.
signal_launcher() { [[ ! -s $meeting/pid ]] || kill -USR1 "$(<"$meeting/pid")" 2>/dev/null || true; }
trap signal_launcher USR1
trap : TERM

# srun starts one task on each node, with all of the job's resources there.
# shellcheck disable=SC2016
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
  "${srun_options[@]}" "${in_container[@]}" bash -c '
    ((SLURM_PROCID > 0)) || echo $$ >"$0"
    exec "$@"' "$meeting/pid" "${joined[@]}" &
step=$!

# A signal to this shell interrupts `wait`.
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
wait "$step" || rc=$?
# srun's status is the highest of all tasks; the launcher's decides.
[[ ! -s $meeting/status ]] || rc=$(<"$meeting/status")
rm -rf -- "$meeting"

state=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%T || true)
if ((rc == 75)) && [[ $requeue == true && $state == RUNNING ]]; then
  if [[ -s $run_folder/stop ]]; then
    echo "slurm job $SLURM_JOB_ID: stopped by nrl-lite stop; not requeued"
  elif [[ $(newest_checkpoint) == "$before" ]]; then
    echo "slurm job $SLURM_JOB_ID: stopped without a new checkpoint in $run_folder; not requeued, because it would make no progress" >&2
  else
    echo "slurm job $SLURM_JOB_ID: stopped with a checkpoint; requeued, to resume from it"
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$rc"
