"""Stand-ins for the services, as small as they can be: ``python -m services.X`` finds them first on PYTHONPATH.

Workers and the control plane note in a journal that they started and stopped; the gateway serves
administration routes from what it finds there.
"""

from __future__ import annotations

from pathlib import Path

_COMMON = """
import json, os, signal, sys, time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_FOLDER"])
NAME = os.environ.get("BLITZ_WORKER_ID", __package__.rpartition(".")[2])

def note(what):
    with open(FOLDER / "journal", "a") as journal:
        journal.write(f"{what} {NAME}\\n")

def stop(number, frame):
    note("stop")
    if NAME.startswith("worker"):
        (FOLDER / NAME).unlink()
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("FAKE_DEAF") else stop)
(FOLDER / f"{NAME}.env").write_text(json.dumps(dict(os.environ)))
note("start")
print("started", flush=True)
if os.environ.get("FAKE_BROKEN"):
    sys.exit("the wrong kind of electricity")
os.write(int(os.environ["BLITZ_READY_FD"]), b"ready")
"""

_WORKER = (
    _COMMON
    + """
(FOLDER / NAME).write_text("")
while True:
    time.sleep(0.05)
"""
)

_IDLE = (
    _COMMON
    + """
while True:
    time.sleep(0.05)
"""
)

_GATEWAY = (
    _COMMON
    + """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    models = []
    def _answer(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        if self.command == "POST":
            asleep = bool(body.get("keep_alive_s"))
            body.setdefault("min_instances", 0 if asleep else 1)
            Handler.models.append(body)
        workers = sorted(path.name for path in FOLDER.glob("worker-?"))
        instances = [{"id": m["name"], "model": m["name"], "state": "serving"} for m in Handler.models
                     if m["min_instances"]]
        workers = [{"id": name} for name in workers]
        status = {"models": Handler.models, "instances": instances, "workers": workers}
        answer = json.dumps(body or status).encode()  # whoever registers a model gets its record
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    do_GET = do_POST = _answer
    def log_message(self, *args):
        pass

address = (os.environ["BLITZ_GATEWAY_HOST"], int(os.environ["BLITZ_GATEWAY_PORT"]))
ThreadingHTTPServer(address, Handler).serve_forever()
"""
)


def write_fake_services(folder: Path) -> dict[str, str]:
    """The services under ``folder``; gives the environment that makes a stack use them."""
    programs = {"gateway": _GATEWAY, "worker": _WORKER, "pool": _IDLE, "planner": _IDLE, "monitor": _IDLE}
    for name, program in programs.items():
        package = folder / "services" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(program)
    (folder / "services" / "__init__.py").write_text("")
    # What a fork server would import for workers takes seconds.
    (folder / "torch.py").write_text("")
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}:{root}", "FAKE_FOLDER": str(folder)}


def journal(folder: Path) -> list[str]:
    """What started and stopped so far, in order."""
    file = folder / "journal"
    return file.read_text().splitlines() if file.exists() else []
