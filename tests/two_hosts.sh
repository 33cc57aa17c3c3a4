#!/usr/bin/env bash
# Two hosts with a real link between them, as two network namespaces: run this under `unshare --net` (or `unshare -Urn`).
# Usage: two_hosts.sh LOG_FOLDER LOSE_AFTER COMMAND...   COMMAND runs on both, with $HOST (its address) and $FIRST (1 on the first).
# LOSE_AFTER: a file; two seconds after it appears the second host is cut off and ended. '-' for never.
set -eu
logs=$1 lose=$2; shift 2
ip link set lo up
unshare --net sleep 600 & far=$!
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
until [ "$(readlink /proc/$far/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add here type veth peer name there netns $far
ip addr add 10.77.0.1/24 dev here; ip link set here up
nsenter --net=/proc/$far/ns/net sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev there; ip link set there up'

FIRST=1 HOST=10.77.0.1 "$@" > "$logs/host0" 2>&1 & first=$!
FIRST=0 HOST=10.77.0.2 nsenter --net=/proc/$far/ns/net "$@" > "$logs/host1" 2>&1 & second=$!
if [ "$lose" != - ]; then
  until [ -e "$lose" ]; do sleep 0.1; done
  sleep 2
  nsenter --net=/proc/$far/ns/net ip link set there down  # so that nobody says goodbye
  lost=$(readlink /proc/$far/ns/net)
  for process in /proc/[0-9]*; do
    if [ "$(readlink "$process/ns/net" || true)" = "$lost" ] && [ "${process#/proc/}" != "$far" ]; then kill -9 "${process#/proc/}" || true; fi
  done
fi
code=0; wait $first || code=$?
wait $second || [ "$lose" != - ] || code=$?
exit $code
