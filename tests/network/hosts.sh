# Several hosts on one machine, for tests and benchmarks that source this: network namespaces, each with a host name
# and an address of its own, joined by a bridge in one more. Nothing of the machine's own network is touched.
#
#   trap remove_hosts EXIT; make_hosts 4; on 2 hostname; cut_off 2; mend 2; limit_rate 1gbit

network=10.77.0            # host K is $network.(K+1), and `hostK` by name
hosts_id=lk$$              # what tells these namespaces from those of other runs
hosts_made=()
hosts_folder=$(mktemp -d)

host_space() { echo "$hosts_id-$1"; }
host_address() { echo "$network.$(($1 + 1))"; }

# Why there can be no hosts here; nothing where there can.
why_no_hosts() {
  local tool
  for tool in ip unshare mount; do
    command -v "$tool" >/dev/null || { echo "$tool is not installed (Debian: iproute2, util-linux)" && return; }
  done
  ((EUID == 0)) || { echo "only root can make network namespaces" && return; }
  local probe=$hosts_id-probe why
  if ! why=$(ip netns add "$probe" 2>&1 && ip -n "$probe" link add bridge type bridge 2>&1 &&
    ip -n "$probe" link add one type veth peer name two 2>&1 && ip netns exec "$probe" unshare --uts hostname probe 2>&1); then
    echo "network namespaces cannot be made: ${why:0:200}"
  fi
  ip netns del "$probe" 2>/dev/null
}

make_hosts() {  # count
  local k space
  hosts_made+=("$hosts_id-switch")
  ip netns add "$hosts_id-switch"
  ip -n "$hosts_id-switch" link add bridge type bridge
  ip -n "$hosts_id-switch" link set bridge up
  echo "127.0.0.1 localhost" >"$hosts_folder/hosts"
  for ((k = 0; k < $1; ++k)); do
    space=$(host_space "$k")
    hosts_made+=("$space")
    ip netns add "$space"
    ip -n "$space" link set lo up
    ip -n "$hosts_id-switch" link add "port$k" type veth peer name eth0 netns "$space"
    plug_in "$k"
    echo "$(host_address "$k") host$k" >>"$hosts_folder/hosts"
  done
}

# Gives the eth0 that a host has an address, and the switch's end of it a place on the bridge.
plug_in() {
  local space
  space=$(host_space "$1")
  ip -n "$space" address add "$(host_address "$1")/24" dev eth0
  ip -n "$space" link set eth0 up
  ip -n "$hosts_id-switch" link set "port$1" master bridge up
}

# Runs a command on a host. Its own /etc/hosts is mounted in the namespace that `ip netns exec` makes for it.
on() { (enter "$@"); }
# The same in this process's place: what is started in the background can then be killed by its number. `host_name` is
# another name for the host.
enter() {
  exec ip netns exec "$(host_space "$1")" unshare --uts bash -c \
    'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"' on "${host_name:-host$1}" "$hosts_folder/hosts" "${@:2}"
}

# The switch forgets a host without a word to either side: both keep their links, and nothing arrives.
cut_off() { ip -n "$hosts_id-switch" link set "port$1" nomaster; }
mend() { ip -n "$hosts_id-switch" link set "port$1" master bridge; }
# The cable is pulled out of a host, which sees that, or the host takes its own interface down.
unplug() { ip -n "$hosts_id-switch" link set "port$1" down; }
take_down() { ip -n "$(host_space "$1")" link set eth0 down; }

# Kills everything that runs on a host.
kill_host() {
  local pids
  pids=$(ip netns pids "$(host_space "$1")")
  [[ -z $pids ]] || kill -KILL $pids
}

# Every link carries at most this much in each direction, after so much at once: `limit_rate 1gbit [128kb]`.
limit_rate() {
  local space k burst=${2:-128kb}
  for space in "${hosts_made[@]}"; do
    [[ $space != *-switch ]] || continue
    k=${space##*-}
    tc -n "$space" qdisc replace dev eth0 root tbf rate "$1" burst "$burst" latency 50ms
    tc -n "$hosts_id-switch" qdisc replace dev "port$k" root tbf rate "$1" burst "$burst" latency 50ms
  done
}

# TCP segments of a few bytes, on all hosts.
limit_packets() {  # bytes
  local space
  for space in "${hosts_made[@]}"; do [[ $space == *-switch ]] || ip -n "$space" link set eth0 mtu "$1"; done
}

remove_hosts() {
  local space pids
  for space in "${hosts_made[@]}"; do
    pids=$(ip netns pids "$space" 2>/dev/null)
    [[ -z $pids ]] || kill -KILL $pids 2>/dev/null
    ip netns del "$space" 2>/dev/null
  done
  hosts_made=()
}
