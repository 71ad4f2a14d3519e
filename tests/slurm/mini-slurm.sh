#!/usr/bin/env bash
# mini-slurm.sh - a real SLURM cluster of N slurmd nodes on one machine, without systemd.
#
#   mini-slurm.sh start      STATE_DIR [N_NODES=2]  bring it up; returns once all nodes are usable
#   mini-slurm.sh stop       STATE_DIR              cancel jobs, bring it down, leave no process
#   mini-slurm.sh status     STATE_DIR              daemons, nodes, queue; rc 0 only if all is up
#   mini-slurm.sh exec       STATE_DIR CMD...       run CMD as on a login node of the cluster
#   mini-slurm.sh kill-node  STATE_DIR NODE         power cut: SIGKILL slurmd and all its tasks
#   mini-slurm.sh start-node STATE_DIR NODE         power the node on again
#   mini-slurm.sh cut-node   STATE_DIR NODE         unplug its network (only with MSL_NET=ns)
#   mini-slurm.sh heal-node  STATE_DIR NODE         plug it in again
#   mini-slurm.sh kill-ctld  STATE_DIR              controller crash (SIGKILL)
#   mini-slurm.sh start-ctld STATE_DIR              controller restart (it recovers its jobs)
#
# start and stop are idempotent. State (job ids, queue) survives stop/start in one STATE_DIR.
# Several clusters can run side by side, each with its own STATE_DIR; each gets free ports.
#
# Settings, from the environment; they are read at the first start in a STATE_DIR, at a start
# with another N_NODES, and at a start with MSL_CLEAN=1. Later calls use the stored ones.
#   MSL_NET=lo       lo: all nodes share this machine's network; sbatch & co work from any shell
#                      that has SLURM_CONF set. Two nodes can't bind one port on 0.0.0.0.
#                    ns: each node has a network namespace of its own (10.77.0.K on a bridge that
#                      lives in one more namespace, the login node's). Real addresses, no port
#                      clashes, no way out of the machine; clients must go through `exec`.
#   MSL_NAMES=""     names of the nodes, e.g. "gpu08 gpu09 gpu10 alpha"; default: node1, node2, ...
#   MSL_CPUS=4       CPUs each node claims (may exceed the machine's: config_overrides)
#   MSL_GPUS=0       fake GPUs per node (GRES counting and CUDA_VISIBLE_DEVICES, no device)
#   MSL_DBD=0        1: slurmdbd on a private MariaDB, so that sacct and sacctmgr work
#   MSL_KILLWAIT=3   seconds from SIGTERM to SIGKILL at a time limit or scancel (SLURM: 30)
#   MSL_GRACE=5      the same at preemption of partition "low" (SLURM's GraceTime: 0)
#   MSL_NODE_TIMEOUT=10  seconds of silence before a node counts as down (SLURM: 300)
#   MSL_CLEAN=0      1: forget the old state, jobs and logs first
#
# Needs root and  apt-get install -y --no-install-recommends slurm-wlm munge
#   MSL_DBD=1:    apt-get install -y --no-install-recommends slurmdbd slurm-wlm-mysql-plugin mariadb-server
#   MSL_NET=ns:   apt-get install -y --no-install-recommends iproute2
#
# How a node is made: `slurmd -D -N nodeK` under unshare(1) in its own PID, mount and UTS (and
# network) namespace. So each node has its own hostname, /proc, /dev/shm and /etc/hosts, and the
# death of the namespace's init takes every process of the node along, as a power cut does. The
# file system (bar /dev/shm) is shared, /tmp included.
set -euo pipefail

die() { echo "mini-slurm: $*" >&2; exit 1; }
usage() { sed -n '2,14p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }

[ $# -ge 2 ] || usage
CMD=$1 ARG=${3:-}
[ -d "$2" ] || [ "$CMD" = start ] || [ "$CMD" = stop ] || die "no such state dir: $2"
mkdir -p "$2"; S=$(cd "$2" && pwd -P); shift 2
export SLURM_CONF=$S/slurm.conf
RUN=$S/run LOG=$S/log
START_TIMEOUT=${MSL_START_TIMEOUT:-30}
NET=lo DBD=0 BASE=0                               # as stored by write_conf
# shellcheck disable=SC1091
[ ! -e "$S/settings" ] || . "$S/settings"
NSID=msl-$(printf %s "$S" | sha1sum | cut -c1-8)  # netns NSID-0: login node and daemons; NSID-K: node K

# ---- processes: a pid file holds "PID STARTTIME", so a reused pid is never taken for ours ----
starttime() { # field 22 of /proc/PID/stat; the name in () may hold blanks, so cut it off first
  local st; st=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  # shellcheck disable=SC2086
  set -- ${st##*) }; [ "$1" != Z ] && echo "${20}"
}
pid_of() { # NAME -> pid, if that very process still lives
  local p t; { read -r p t < "$RUN/$1.pid"; } 2>/dev/null || return 1
  [ "$(starttime "$p")" = "$t" ] && echo "$p"
}
spawn() { # NAME CMD...: a detached daemon that holds neither the caller's pipes nor our lock (fd 9)
  local name=$1 p; shift
  (cd / && exec setsid "$@") </dev/null >>"$LOG/$name.out" 2>&1 9>&- &
  p=$!
  echo "$p $(starttime "$p" || echo 0)" > "$RUN/$name.pid"
}
await_gone() { # NAME SECONDS
  local i
  for ((i = 0; i < $2 * 20; i++)); do pid_of "$1" >/dev/null || return 0; sleep 0.05; done
  return 1
}
kill_hard() { # NAME
  local p
  if p=$(pid_of "$1"); then kill -KILL "$p" 2>/dev/null || true; await_gone "$1" 10 || die "$1 ($p) survives SIGKILL"; fi
  rm -f "$RUN/$1.pid"
}
reap() { # NAME SECONDS: TERM, wait, KILL
  local p
  if p=$(pid_of "$1"); then kill -TERM "$p" 2>/dev/null || true; await_gone "$1" "$2" || true; fi
  kill_hard "$1"
}
await() { # SECONDS WHAT CMD...: until CMD succeeds
  local end=$((SECONDS + $1)) t=$1 what=$2; shift 2
  while ((SECONDS <= end)); do "$@" >/dev/null 2>&1 && return; sleep 0.05; done
  die "$what did not come up within $t s; logs in $LOG"
}
nodes() { [ ! -e "$SLURM_CONF" ] || sed -n 's/^NodeName=\([^ ]*\) .*/\1/p' "$SLURM_CONF"; }
index_of() { nodes | grep -nx -- "$1" | cut -d: -f1; }
port_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
IN_HEAD=()                                        # prefix that runs a command in the login node's netns
set_head() { if [ "$NET" = ns ]; then IN_HEAD=(nsenter "--net=/run/netns/$NSID-0"); else IN_HEAD=(); fi; }
set_head
client() { timeout 20 "${IN_HEAD[@]}" "$@" </dev/null; }  # a SLURM client command

# ---- configuration ----
write_conf() { # N
  local n=$1 cpus=${MSL_CPUS:-4} gpus=${MSL_GPUS:-0} k try ctl gres='' subnet names
  read -ra names <<< "${MSL_NAMES:-}"
  for ((k = ${#names[@]}; k < n; k++)); do names[k]=node$((k + 1)); done
  NET=${MSL_NET:-lo} DBD=${MSL_DBD:-0}
  case $NET in lo) ctl=127.0.0.1 subnet=127.0.1 ;; ns) ctl=10.77.0.254 subnet=10.77.0 ;; *) die "MSL_NET: lo or ns" ;; esac
  ((n <= 90)) || die "at most 90 nodes"
  # Ports BASE..BASE+99, below the ephemeral range, so that no client socket takes one meanwhile, and
  # below those of the jobs (cluster/environment.py: 15000 and up), which a daemon here would block:
  # slurmctld BASE, node K BASE+K, slurmdbd BASE+98, MariaDB BASE+99.
  for ((try = 0; ; try++)); do
    ((try < 50)) || die "no free ports"
    BASE=$((10000 + RANDOM % 50 * 100))
    for ((k = 0; k < 100; k++)); do port_free $((BASE + k)) || continue 2; done
    break
  done
  echo "NET=$NET DBD=$DBD BASE=$BASE" > "$S/settings"
  set_head

  { echo "127.0.0.1 localhost"; echo "$ctl $(hostname -s)"
    for ((k = 1; k <= n; k++)); do echo "$subnet.$k ${names[k - 1]}"; done; } > "$S/hosts"

  # SLURM looks for gres.conf, mpi.conf and slurmdbd.conf beside slurm.conf.
  rm -f "$S"/{gres,mpi,slurmdbd}.conf
  if ((gpus > 0)); then
    gres=" Gres=gpu:$gpus"; mkdir -p "$S/dev"
    # SLURM wants char devices and takes the index from the name: more /dev/nulls
    for ((k = 0; k < gpus; k++)); do rm -f "$S/dev/gpu$k"; mknod -m 666 "$S/dev/gpu$k" c 1 3; done
    echo "NodeName=$(IFS=,; echo "${names[*]:0:n}") Name=gpu File=$S/dev/gpu[0-$((gpus - 1))]" > "$S/gres.conf"
  fi
  # /dev/shm is private to a node. In the shared /tmp (the default) the nodes' PMIx scratch collides:
  # "Cannot create directory /tmp/spmix_appdir_...: File exists", and srun --mpi=pmix fails.
  echo "PMIxCliTmpDirBase=/dev/shm" > "$S/mpi.conf"

  cat > "$SLURM_CONF.new" <<EOF
ClusterName=mini
SlurmctldHost=$(hostname -s)($ctl)
SlurmctldPort=$BASE
SlurmUser=root
SlurmdUser=root
# cred_expire is also how long a requeued job waits before it may start again (default: 120 s)
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.socket,cred_expire=8
StateSaveLocation=$S/state
SlurmdSpoolDir=$S/spool/%n
SlurmctldPidFile=$RUN/slurmctld.slurm-pid
SlurmdPidFile=$RUN/%n.slurm-pid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/%n.log
# no cgroups: processes are tracked by their parents, CPUs and memory are counted, not enforced
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# one line per finished job, with or without slurmdbd
JobCompType=jobcomp/filetxt
JobCompLoc=$LOG/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
# shorter intervals than the defaults, for tests
SchedulerParameters=bf_interval=2,sched_interval=5,batch_sched_delay=0
# partition "high" preempts "low": SIGCONT+SIGTERM to the steps, after GraceTime kill and requeue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=${MSL_KILLWAIT:-3}
# finished jobs stay visible to scontrol show job and squeue -t all for a day
MinJobAge=86400
# a silent node is DOWN after about 1 to 2.5 times this (its jobs are requeued); when it comes back it is used again
SlurmdTimeout=${MSL_NODE_TIMEOUT:-10}
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
EOF
  if [ "$DBD" = 1 ]; then
    cat >> "$SLURM_CONF.new" <<EOF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((BASE + 98))
# for munge this "password" is the socket; without it clients try the default socket and fail
AccountingStoragePass=$RUN/munge.socket
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
EOF
    (umask 077; cat > "$S/slurmdbd.conf") <<EOF
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((BASE + 98))
SlurmUser=root
PidFile=$RUN/slurmdbd.slurm-pid
LogFile=$LOG/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((BASE + 99))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
EOF
  else
    echo "AccountingStorageType=accounting_storage/none" >> "$SLURM_CONF.new"
    echo "JobAcctGatherType=jobacct_gather/none" >> "$SLURM_CONF.new"
  fi
  for ((k = 1; k <= n; k++)); do
    echo "NodeName=${names[k - 1]} NodeHostname=${names[k - 1]} NodeAddr=$subnet.$k Port=$((BASE + k)) CPUs=$cpus RealMemory=1000$gres"
  done >> "$SLURM_CONF.new"
  cat >> "$SLURM_CONF.new" <<EOF
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=${MSL_GRACE:-5} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
EOF
  mv "$SLURM_CONF.new" "$SLURM_CONF"
}

# ---- network namespaces (MSL_NET=ns) ----
start_net() {
  [ "$NET" = ns ] || return 0
  local n k head=$NSID-0
  if [ ! -e "/run/netns/$head" ]; then
    ip netns add "$head"
    ip -n "$head" link set lo up
    ip -n "$head" link add br0 type bridge
    ip -n "$head" addr add 10.77.0.254/24 dev br0
    ip -n "$head" link set br0 up
  fi
  for n in $(nodes); do
    k=$(index_of "$n")
    [ ! -e "/run/netns/$NSID-$k" ] || continue
    ip netns add "$NSID-$k"
    ip -n "$NSID-$k" link set lo up
    ip -n "$head" link add "v$k" type veth peer name eth0 netns "$NSID-$k"
    ip -n "$head" link set "v$k" master br0 up
    ip -n "$NSID-$k" addr add "10.77.0.$k/24" dev eth0
    ip -n "$NSID-$k" link set eth0 up
  done
}
stop_net() {
  local f
  for f in "/run/netns/$NSID-"*; do [ ! -e "$f" ] || ip netns del "${f##*/}"; done
}
plug() { # NODE up|down
  [ "$NET" = lo ] || ip -n "$NSID-0" link set "v$(index_of "$1")" "$2"
}

# ---- daemons ----
start_munged() {
  pid_of munged >/dev/null && return
  rm -f "$RUN"/munge.socket*
  [ -s "$S/munge.key" ] || (umask 077; dd if=/dev/urandom of="$S/munge.key" bs=1024 count=1 status=none)
  # --force: accept a state dir below a group- or world-writable folder
  spawn munged munged -F --force --socket="$RUN/munge.socket" --key-file="$S/munge.key" \
    --pid-file="$RUN/munged.munge-pid" --seed-file="$S/munge.seed" --log-file="$LOG/munged.log"
  await "$START_TIMEOUT" munged munge -S "$RUN/munge.socket" -n
}
start_dbd() {
  [ "$DBD" = 1 ] || return 0
  local sock=$RUN/mariadb.sock
  if ! pid_of mariadbd >/dev/null; then
    [ -d "$S/db/mysql" ] || mariadb-install-db --no-defaults --datadir="$S/db" --user=root \
      --auth-root-authentication-method=normal --skip-test-db >"$LOG/mariadb-install.out" 2>&1
    spawn mariadbd "${IN_HEAD[@]}" mariadbd --no-defaults --user=root --datadir="$S/db" --socket="$sock" \
      --bind-address=127.0.0.1 --port=$((BASE + 99)) --pid-file="$RUN/mariadbd.db-pid" \
      --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=2
    await "$START_TIMEOUT" mariadbd mariadb --no-defaults -u root -S "$sock" -e 'select 1'
    mariadb --no-defaults -u root -S "$sock" -e "
      create database if not exists slurm_acct;
      create user if not exists 'slurm'@'127.0.0.1' identified by 'slurm';
      create user if not exists 'slurm'@'localhost' identified by 'slurm';
      grant all on slurm_acct.* to 'slurm'@'127.0.0.1', 'slurm'@'localhost';"
  fi
  if ! pid_of slurmdbd >/dev/null; then
    spawn slurmdbd "${IN_HEAD[@]}" slurmdbd -D
    await "$START_TIMEOUT" slurmdbd client sacctmgr -n show cluster
    client sacctmgr -in add cluster mini >/dev/null 2>&1 || true   # rc 1 if it's there already
  fi
}
start_ctld() {
  pid_of slurmctld >/dev/null || spawn slurmctld "${IN_HEAD[@]}" slurmctld -D -f "$SLURM_CONF"
  await "$START_TIMEOUT" slurmctld bash -c '"$@" | grep -q "is UP"' - "${IN_HEAD[@]}" scontrol ping
}
start_node() {
  pid_of "$1" >/dev/null && return
  local in_net=()
  [ "$NET" = lo ] || in_net=(nsenter "--net=/run/netns/$NSID-$(index_of "$1")")
  plug "$1" up
  mkdir -p "$S/spool/$1"
  # $0 = node, $1 = hosts. This bash is the node's init: it reaps orphans and hands TERM on to slurmd.
  # Its end (or unshare's: --kill-child) makes the kernel kill all that is left of the node.
  # shellcheck disable=SC2016
  spawn "$1" "${in_net[@]}" unshare --pid --fork --kill-child=KILL --mount --uts --mount-proc bash -c '
      hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 1
      trap "kill -TERM \$d" TERM
      slurmd -D -N "$0" & d=$!
      wait $d; wait $d' "$1" "$S/hosts"
}
stop_node() { # NODE SECONDS: slurmd gets SECONDS to end by itself (0: a power cut)
  local p c
  if (($2 > 0)) && p=$(pid_of "$1"); then
    c=$(cat "/proc/$p/task/$p/children" 2>/dev/null || true)   # the node's init
    # shellcheck disable=SC2086
    [ -z "$c" ] || kill -TERM $c 2>/dev/null || true
    await_gone "$1" "$2" || true
  fi
  kill_hard "$1"
}
up_nodes() { client sinfo -h -N -p main -o '%T' 2>/dev/null | grep -cxE 'idle|mixed|allocated|completing' || true; }
all_up() { [ "$(up_nodes)" = "$1" ]; }

# ---- commands ----
do_start() {
  local n b have
  for b in slurmctld slurmd munged unshare; do
    command -v $b >/dev/null || die "$b is missing: apt-get install -y --no-install-recommends slurm-wlm munge"
  done
  have=$(nodes | grep -c . || true)
  n=${ARG:-$have}; ((n > 0)) || n=2
  if [ "${MSL_CLEAN:-0}" = 1 ]; then
    do_stop; rm -rf "${S:?}"/{state,spool,log,run,dev,db,hosts,settings} "${S:?}"/*.conf; have=0
  fi
  mkdir -p "$RUN" "$LOG" "$S/state" "$S/spool"; chmod 755 "$S" "$RUN" "$LOG"
  if ((have != n)); then do_stop; write_conf "$n"; fi
  start_net; start_munged; start_dbd; start_ctld
  for b in $(nodes); do start_node "$b"; done
  await "$START_TIMEOUT" "all $n nodes" all_up "$n"
  echo "mini-slurm: $n nodes up; SLURM_CONF=$SLURM_CONF"
}
do_stop() {
  local n jobs end=$((SECONDS + 30))
  if pid_of slurmctld >/dev/null && pid_of munged >/dev/null; then
    # let the jobs end in order (SIGTERM, KillWait), so that the kept state has none running
    jobs=$(client squeue -h -o %A 2>/dev/null | sort -u) || jobs=''
    # shellcheck disable=SC2086
    [ -z "$jobs" ] || client scancel $jobs 2>/dev/null || true
    while ((SECONDS <= end)) && [ -n "$(client squeue -h -t R,CG,CF,S -o %A 2>/dev/null)" ]; do sleep 0.05; done
  fi
  for n in $(nodes); do stop_node "$n" 3; done
  reap slurmctld 5; reap slurmdbd 5; reap mariadbd 10; reap munged 2
  stop_net
  rm -f "$RUN"/*.slurm-pid "$RUN"/*.munge-pid "$RUN"/munge.socket*
}
do_status() {
  local n bad=0
  for n in munged $([ "$DBD" = 0 ] || echo mariadbd slurmdbd) slurmctld $(nodes); do
    if pid_of "$n" >/dev/null; then echo "$n: pid $(pid_of "$n")"; else echo "$n: down"; bad=1; fi
  done
  [ -n "$(nodes)" ] || bad=1
  if ((bad == 0)); then client sinfo -N -l && client squeue || bad=1; fi
  return $bad
}
do_exec() { # in the login node's network, with the cluster's /etc/hosts
  # shellcheck disable=SC2016
  exec "${IN_HEAD[@]}" unshare --mount bash -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$S/hosts" "$@"
}

case $CMD in start | stop | kill-* | start-* | cut-* | heal-*)
  [ "$(id -u)" = 0 ] || die "needs root (namespaces, slurmd)"
  exec 9>"$S/.lock"; flock -w 120 9 || die "another start or stop holds $S/.lock" ;;
esac
case $CMD in *-node | *-ctld | exec) [ -e "$SLURM_CONF" ] || die "never started: $S" ;; esac
case $CMD in *-node) nodes | grep -qx -- "$ARG" || die "no such node: '$ARG'" ;; esac
case $CMD in cut-node | heal-node) [ "$NET" = ns ] || die "$CMD needs MSL_NET=ns" ;; esac

case $CMD in
  start)      do_start ;;
  stop)       do_stop; echo "mini-slurm: down" ;;
  status)     do_status ;;
  exec)       [ $# -ge 1 ] || usage; do_exec "$@" ;;
  kill-node)  plug "$ARG" down; stop_node "$ARG" 0 ;;  # cable first: peers see silence, not a FIN
  start-node) start_node "$ARG" ;;
  cut-node)   plug "$ARG" down ;;
  heal-node)  plug "$ARG" up ;;
  kill-ctld)  kill_hard slurmctld ;;
  start-ctld) start_ctld ;;
  *)          usage ;;
esac
