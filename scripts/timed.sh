#!/bin/sh
# usage: timed.sh OBJECT COMMAND...
# Runs a compiler, and leaves beside the object what CPU time it took: two lines of `times`, the compiler's is the second.
object=$1
shift
"$@"
status=$?
times >"$object.seconds"
exit $status
