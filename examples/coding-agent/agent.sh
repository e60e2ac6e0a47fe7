#!/bin/sh
# The agent's loop, inside the sandbox: has somebody edit, runs the tests, tells what they said and tries again, commits,
# and pushes through the gate. Who edits is the command in /opt/agent/command.
set -eu

given=/opt/agent
attempts=3
export HOME=/root PROMPT_FILE=/tmp/prompt
git config user.name agent
git config user.email agent@example.invalid
cp "$given/prompt" "$PROMPT_FILE"

attempt=1
while :; do
    viv step "attempt $attempt of $attempts"
    sh -c "$(cat "$given/command")" <"$PROMPT_FILE"
    viv step --count 0 "running the tests"
    if sh -c "$(cat "$given/test")" >/tmp/said 2>&1; then
        cat /tmp/said
        break
    fi
    cat /tmp/said
    if [ "$attempt" -ge "$attempts" ]; then
        echo "the tests still fail after $attempts attempts: nothing is pushed"
        exit 1
    fi
    attempt=$((attempt + 1))
    { cat "$given/prompt" && echo "The tests say:" && tail -n 50 /tmp/said; } >"$PROMPT_FILE"
done

git add --all
if git diff --cached --quiet; then
    echo "nothing was changed: nothing is pushed"
    exit 1
fi
git commit -q -m "$(head -n 1 "$given/prompt")"
# From here on it would be seen outside. Once the task is to stop, the gate lets nothing begin.
viv gate --effect push -- git push -q origin HEAD:refs/heads/agent
echo "pushed $(git rev-parse --short HEAD)"
