"""What schemathesis does not know by itself."""
import json
import os
import urllib.error
import urllib.request

import schemathesis

# An archive is bytes.
schemathesis.serializer.alias("application/x-tar", "application/octet-stream")

# What scripts/schemathesis made, for requests to be about something that is there.
OURS = {os.environ["VIV_SANDBOX"], "somewhere"}
ENDS = {"deleteSandbox", "stopSandbox"}

# Those that wait for a sandbox, and how long they do here: one that is made up may never be ready.
WAITS = {"createSandbox", "ensureSandbox", "stopSandbox", "runTask", "stopTask", "continueTask"}
WAIT_MS_MAX = 1000

# Most of those that were made up and live: real ones cost something, and a quota would answer for the rest.
LIVE_MAX = 3
LIVE = []


@schemathesis.hook
def before_call(ctx, case, **kwargs):
    operation = case.operation.definition.raw["operationId"]
    if operation in WAITS and isinstance(case.body, dict):
        wait_ms = case.body.get("wait_ms")
        # What makes no sense is left as it is.
        if wait_ms is None or (type(wait_ms) is int and wait_ms > WAIT_MS_MAX):
            case.body["wait_ms"] = WAIT_MS_MAX
    if operation == "startExecution" and "follow" in (case.query or {}) and isinstance(case.body, dict):
        # Whoever follows a start waits for its end, and it for its place.
        for name in ("limit_ms", "queue_ms"):
            if type(case.body.get(name)) is int and case.body[name] > WAIT_MS_MAX:
                case.body[name] = WAIT_MS_MAX
        case.body.setdefault("limit_ms", WAIT_MS_MAX)
        if case.body["limit_ms"] == "none":
            case.body["limit_ms"] = WAIT_MS_MAX
    named = case.body.get("sandbox") if isinstance(case.body, dict) else None
    if operation == "runTask" and isinstance(named, str) and named in OURS:
        # Its end would be that of what the others are about.
        case.body["sandbox"] = "nowhere"
    sandbox = (case.path_parameters or {}).get("sandbox")
    if sandbox not in OURS:
        return
    if operation in ENDS:
        # Then nothing would be there for the others.
        case.path_parameters["sandbox"] = "nowhere"
        return
    if operation == "setLimits":
        # Limits that are made up leave no room to answer the others.
        case.path_parameters["sandbox"] = os.environ["VIV_LIMITED"]
    if case.meta is not None and case.meta.generation.mode.is_positive:
        # A generation that is made up is always another one.
        if "generation" in (case.query or {}):
            case.query["generation"] = 1
        if "Viv-Generation" in (case.headers or {}):
            case.headers["Viv-Generation"] = "1"


def ask(method, path, body=None):
    headers = {"Authorization": "Bearer " + os.environ["VIV_KEY"]}
    if body is not None:
        headers["Content-Type"] = "application/json"
        body = json.dumps(body).encode()
    request = urllib.request.Request(os.environ["VIV_URL"] + path, body, headers, method=method)
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as refused:
        # Whoever ended it before was one of these requests.
        if refused.code not in (404, 409, 410):
            raise


@schemathesis.hook
def after_call(ctx, case, response):
    operation = case.operation.definition.raw["operationId"]
    if operation in ("runTask", "continueTask") and response.status_code in (200, 201, 202):
        # A task that was made up makes a sandbox for itself, sooner or later.
        task = json.loads(response.content)
        ask("POST", f"/v1/tasks/{task['id']}/stop", {"wait_ms": 60000})
        if task["sandbox"] not in OURS:
            ask("DELETE", f"/v1/sandboxes/{task['sandbox']}")
    if case.operation.definition.raw["operationId"] != "createSandbox" or response.status_code not in (200, 201, 202):
        return
    made = json.loads(response.content)["id"]
    if made not in LIVE:
        LIVE.append(made)
    while len(LIVE) > LIVE_MAX:
        ask("DELETE", f"/v1/sandboxes/{LIVE.pop(0)}")


@schemathesis.hook
def filter_case(ctx, case):
    # A header that nobody knows breaks no rule: proxies add some, and so do clients.
    return not any("unknown-property" in name for name in case.headers or {})
