#!/bin/sh
# Stands where a model would: reads a prompt, edits. It knows one mistake only, and needs to be told by the tests where
# it is, so that the loop is gone through twice.
set -eu
prompt=$(cat)
case $prompt in
*'The tests say:'*'expected: Hello, world!'*)
    echo "scripted: the greeting lacks its mark"
    # shellcheck disable=SC2016
    sed -i 's/Hello, \$1"/Hello, $1!"/' greet.sh
    ;;
*)
    echo "scripted: looking around"
    ls
    ;;
esac
