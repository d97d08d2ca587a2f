#!/bin/sh
# Runs a program under Wine: wine.sh PROGRAM [ARGUMENT...]. Wine's server resets the connection of a few programs in a
# thousand before their first instruction. Such a program is started again; no other failure is.
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
for _ in 1 2 3; do
  wine "$@" 2> "$errors"
  status=$?
  cat "$errors" >&2
  grep -q "^wine client error:0: recvmsg: Connection reset" "$errors" || break
done
exit $status
