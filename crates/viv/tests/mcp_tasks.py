"""An official MCP client with tasks, over two connections: what it prints as JSON is looked at by crates/viv/tests/mcp.rs."""

import json
import sys

import anyio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_client import is_error, structured, text

PATIENCE = 120

WORKS = """
viv step --session first begun
count=0
while :; do count=$((count + 1)); echo working $count; viv step; sleep 0.2; done
"""

GOES_ON = """
echo "session: $VIV_TASK_SESSION"
echo "outside: ${TOKEN:-nothing}"
viv gate --effect push -- sh -c 'echo "inside: ${#TOKEN}"'
echo last
"""


def told(result):
    return {"text": text(result), "error": is_error(result), "data": structured(result)}


async def main(viv, env):
    seen = {"news": []}
    server = StdioServerParameters(command=viv, args=["mcp", "--credential", "TOKEN"], env=env)
    async with (
        stdio_client(server) as (read_one, write_one),
        stdio_client(server) as (read_two, write_two),
        ClientSession(read_one, write_one) as one,
        ClientSession(read_two, write_two) as two,
    ):
        await one.initialize()
        await two.initialize()
        works = anyio.Event()

        async def progress(count, total, message):
            seen["news"].append(message)
            if message and message.startswith("working "):
                works.set()

        async def run():
            asked = {"script": WORKS, "keep_alive": True, "effects": ["push"], "credentials": ["TOKEN"]}
            seen["ran"] = told(await one.call_tool("task_run", asked, progress_callback=progress))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            with anyio.fail_after(PATIENCE):
                await works.wait()
            listed = structured(await two.call_tool("task_list", {"states": ["running", "committing"]}))["tasks"]
            seen["found"] = len(listed)
            task = {"task": listed[0]["task"]}
            seen["shown"] = structured(await two.call_tool("task_show", task))["task"]["state"]
            with anyio.fail_after(PATIENCE):
                stopped = await two.call_tool("task_stop", {**task, "wait_ms": 60000})
            seen["stopped"] = structured(stopped)

        with anyio.fail_after(PATIENCE):
            seen["continued"] = told(await two.call_tool("task_continue", {**task, "script": GOES_ON}))
            seen["tail"] = text(await two.call_tool("task_logs", {**task, "tail": 1}))
            seen["search"] = text(await two.call_tool("task_logs", {**task, "search": "session"}))
            long = await two.call_tool("task_continue", {**task, "script": "seq 1 100000"})
            seen["long"] = {"bytes": len(text(long)), "tail": text(long)[-400:]}

        seen["missing"] = told(await two.call_tool("task_show", {"task": "tsk_none"}))
        seen["nothing"] = told(await two.call_tool("task_run", {}))
        seen["both"] = told(await two.call_tool("task_run", {"script": "true", "argv": ["true"]}))
        asked = {"script": "true", "effects": ["push"], "credentials": ["VIV_KEY"]}
        seen["unknown_credential"] = told(await two.call_tool("task_run", asked))

        # A call that is cancelled stops its task.
        began = anyio.Event()

        async def begun(count, total, message):
            if message == "up":
                began.set()

        async def stubborn():
            script = "trap '' TERM; echo up; setsid sleep 1000 & while :; do sleep 1; done"
            await one.call_tool("task_run", {"script": script}, progress_callback=begun)

        async with anyio.create_task_group() as group:
            group.start_soon(stubborn)
            with anyio.fail_after(PATIENCE):
                await began.wait()
            living = structured(await two.call_tool("task_list", {"states": ["running"]}))["tasks"]
            seen["cancelled"] = living[0]["task"]
            group.cancel_scope.cancel()

    print(json.dumps(seen))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], json.loads(sys.argv[2]))
