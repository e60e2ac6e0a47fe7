"""An official MCP client against `viv mcp`: what it prints as JSON is looked at by crates/viv/tests/mcp.rs."""

import json
import sys

import anyio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client


def text(result):
    return "".join(block.text for block in result.content if block.type == "text")


def structured(result):
    found = getattr(result, "structured_content", None)
    return found if found is not None else getattr(result, "structuredContent", None)


def is_error(result):
    return bool(getattr(result, "is_error", None) or getattr(result, "isError", None))


async def session(viv, env, work):
    server = StdioServerParameters(command=viv, args=["mcp"], env=env)
    async with stdio_client(server) as (read, write):
        async with ClientSession(read, write) as client:
            await client.initialize()
            return await work(client)


async def main(viv, env):
    seen = {}

    async def work(client):
        seen["tools"] = sorted(tool.name for tool in (await client.list_tools()).tools)
        made = await client.call_tool("sandbox_create", {"name": "tooled"})
        seen["made"] = structured(made)["status"]
        name = {"sandbox": "tooled"}
        news = []

        async def progress(count, total, message):
            news.append([count, message])

        script = "for n in 1 2 3 4 5; do echo line $n; sleep 0.4; done; echo wrong >&2; exit 3"
        ran = await client.call_tool("execute", {**name, "script": script}, progress_callback=progress)
        seen["ran"] = {"text": text(ran), "error": is_error(ran), "data": structured(ran)}
        seen["news"] = news
        await client.call_tool("write_file", {**name, "path": "/root/deep/note", "text": "written\n"})
        seen["read"] = text(await client.call_tool("read_file", {**name, "path": "/root/deep/note"}))
        seen["files"] = text(await client.call_tool("list_files", {**name, "path": "/root/deep"}))
        long = await client.call_tool("execute", {**name, "script": "seq 1 100000"})
        seen["long"] = {"bytes": len(text(long)), "tail": text(long)[-400:], "data": structured(long)}
        seen["ensured"] = structured(await client.call_tool("sandbox_ensure", name))["status"]
        listed = structured(await client.call_tool("sandbox_list", {}))["sandboxes"]
        seen["listed"] = [sandbox["name"] for sandbox in listed]
        seen["diagnosed"] = "tooled" in text(await client.call_tool("sandbox_diagnose", name))
        missing = await client.call_tool("sandbox_ensure", {"sandbox": "nobody"})
        seen["missing"] = {"error": is_error(missing), "text": text(missing)}
        wrong = await client.call_tool("execute", {**name, "argv": ["true"], "nonsense": 1})
        seen["wrong"] = {"error": is_error(wrong), "text": text(wrong)}

        # A call that is cancelled ends its command with all that it started.
        began = anyio.Event()

        async def started(count, total, message):
            began.set()

        async def stubborn():
            script = "trap '' TERM; echo up; setsid sleep 1000 & while :; do sleep 1; done"
            await client.call_tool("execute", {**name, "script": script}, progress_callback=started)

        async with anyio.create_task_group() as group:
            group.start_soon(stubborn)
            with anyio.fail_after(60):
                await began.wait()
            group.cancel_scope.cancel()

    await session(viv, env, work)
    print(json.dumps(seen))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], json.loads(sys.argv[2]))
