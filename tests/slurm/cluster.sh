# A Slurm cluster of one node, this machine, of our own: with a key, sockets, ports and a folder that nothing else on the
# machine knows, started without systemd, as root or as anybody. To be sourced:
#   start_cluster FOLDER   afterwards sinfo, srun, sbatch, scontrol and so on speak to it
#   stop_cluster           ends everything that was started in it; nothing is left
# The caller sets `trap stop_cluster EXIT` before it starts one.

# Why there can be no cluster here; empty where there can.
why_no_cluster() {
  local program
  for program in munged slurmctld slurmd srun sbatch scontrol; do
    PATH=$PATH:/usr/sbin command -v $program >/dev/null || { echo "$program is not installed (Debian: slurm-wlm munge)"; return; }
  done
  command -v python3 >/dev/null || echo "python3 is not installed"
}

# Ports that nobody listens on, that many.
free_ports() {
  python3 -c 'import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for s in held: s.bind(("127.0.0.1", 0))
print(*[s.getsockname()[1] for s in held])' "$1"
}

cluster=  # its folder
start_cluster() {
  local host control node
  cluster=$1
  PATH=$PATH:/usr/sbin
  mkdir -p "$cluster"/{state,spool}
  chmod 755 "$cluster"
  host=$(hostname -s)
  read -r control node < <(free_ports 2)
  export LOCKSTEP_TEST_CLUSTER=$cluster  # by which its processes are known
  export SLURM_CONF=$cluster/slurm.conf
  head -c 128 /dev/urandom >"$cluster/munge.key"
  chmod 600 "$cluster/munge.key"
  # A requeued job waits until its old credentials have expired: cred_expire. Slurm believes in four cores here, whatever
  # there are (config_overrides).
  cat >"$SLURM_CONF" <<CONF
ClusterName=lockstep
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control
SlurmdPort=$node
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$cluster/munge.socket,cred_expire=5
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
StateSaveLocation=$cluster/state
SlurmdSpoolDir=$cluster/spool
SlurmctldPidFile=$cluster/slurmctld.pid
SlurmdPidFile=$cluster/slurmd.pid
SlurmctldLogFile=$cluster/slurmctld.log
SlurmdLogFile=$cluster/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobRequeue=1
KillWait=20
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=60
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 RealMemory=512 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
CONF
  munged --foreground --force --key-file="$cluster/munge.key" --socket="$cluster/munge.socket" \
    --pid-file="$cluster/munged.pid" --log-file="$cluster/munged.log" --seed-file="$cluster/munged.seed" \
    --num-threads=2 </dev/null >"$cluster/munged.out" 2>&1 & disown
  cluster_await 10 test -S "$cluster/munge.socket" || return 1
  slurmctld -D </dev/null >"$cluster/slurmctld.out" 2>&1 & disown
  slurmd -D </dev/null >"$cluster/slurmd.out" 2>&1 & disown
  cluster_await 30 cluster_ready
}
cluster_ready() { [[ $(timeout 5 sinfo --noheader --format=%t 2>/dev/null) == idle ]]; }

cluster_await() {  # seconds command...
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < end)) || return 1
    sleep 0.1
  done
}

# The processes that were started in the cluster, daemons and jobs alike; the shell that asks is none of them.
cluster_processes() {
  local environ pid
  for environ in /proc/[0-9]*/environ; do
    pid=${environ#/proc/} pid=${pid%/environ}
    if ((pid != $$ && pid != BASHPID)) && grep -qzsFx "LOCKSTEP_TEST_CLUSTER=$cluster" "$environ"; then echo "$pid"; fi
  done
}
stop_cluster() {
  local left i
  [[ -n $cluster ]] || return 0
  for ((i = 0; i < 100; ++i)); do
    left=$(cluster_processes)
    [[ -n $left ]] || break
    kill -KILL $left 2>/dev/null
    sleep 0.05
  done
  unset SLURM_CONF LOCKSTEP_TEST_CLUSTER
  [[ -z $left ]] || { echo "FAILED processes of the cluster are left: $left"; return 1; }
  cluster=
}
