"""What the checks of deploy/ look at: its files, what the chart renders, and what the program says of itself."""

import functools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart" / "quota-share"
TOOLS = ROOT / "target" / "tools"
BINARY = Path(os.environ.get("QUOTA_SHARE_BINARY", ROOT / "target" / "debug" / "quota-share"))
NO_BINARY = f"skipped: {BINARY.name} is not built (cargo build)"

# Values that the chart is rendered with: the examples for users, and those that switch on or off whatever can be.
VALUES = sorted([*(DEPLOY / "values").glob("*.yaml"), *(ROOT / "tests" / "data" / "deploy").glob("*.yaml")])


def text(path):
    """The text of a file of the repository."""
    return (ROOT / path).read_text()


def helm(*arguments):
    """Runs helm; its end is the caller's to judge."""
    command = [TOOLS / "helm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def template(*arguments):
    """The chart as `helm template` renders it."""
    return helm("template", "quota-share", CHART, "--namespace", "quota-share", *arguments)


@functools.cache
def rendered_text(values):
    """What the chart renders with a file of values."""
    done = template("--values", values)
    assert done.returncode == 0, f"{values.name}: {done.stderr}"
    return done.stdout


@functools.cache
def rendered(values):
    """The objects that the chart renders with a file of values."""
    return [document for document in yaml.safe_load_all(rendered_text(values)) if document]


def of_kind(objects, kind):
    """Those of one kind."""
    return [each for each in objects if each["kind"] == kind]


def stateful_set(objects):
    """The one StatefulSet."""
    (found,) = of_kind(objects, "StatefulSet")
    return found


def pod(objects):
    """The specification of the replicas' pods."""
    return stateful_set(objects)["spec"]["template"]["spec"]


def container(objects):
    """The one container of a replica."""
    (found,) = pod(objects)["containers"]
    return found


def environment(objects):
    """The container's variables; the value of one from a Secret is None."""
    return {variable["name"]: variable.get("value") for variable in container(objects)["env"]}


def known_variables():
    """The variables that the program reads: its help names them (a test holds the file to what it prints)."""
    help_text = text("tests/data/help/serve.txt")
    return set(re.findall(r"\[env: (\w+)\]", help_text)) | {"RUST_LOG", "SSL_CERT_FILE"}


def is_known(variable):
    """Whether the program reads this variable."""
    return variable in known_variables() or variable.startswith("OTEL_")


def services():
    """The methods of each service of the contract, by its full name, and whether a method's answer is a stream."""
    found = {}
    for proto in (ROOT / "proto" / "quotashare" / "v1").glob("*.proto"):
        for name, body in re.findall(r"^service (\w+) \{(.*?)^\}", proto.read_text(), re.M | re.S):
            methods = re.findall(r"^  rpc (\w+)\(.*\) returns \((stream )?", body, re.M)
            found[f"quotashare.v1.{name}"] = {method: bool(stream) for method, stream in methods}
    return found


def durations(path):
    """The constants of a source file that are durations, in seconds."""
    pattern = r"const (\w+): Duration = Duration::from_(secs|millis)\(([\d_]+)\)"
    return {
        name: int(number.replace("_", "")) / (1 if unit == "secs" else 1000)
        for name, unit, number in re.findall(pattern, text(path))
    }


def stop_seconds_max():
    """The longest that a stop takes: every bound of the process' end, and one flush each for traces and metrics."""
    bounds = {name: s for name, s in durations("src/app.rs").items() if not name.endswith("_INTERVAL")}
    assert "DRAIN_TIMEOUT" in bounds, "src/app.rs no longer says how long open calls get"
    return sum(bounds.values()) + 2 * durations("src/telemetry.rs")["FLUSH_TIMEOUT"]


class Running:
    """The program, serving on free ports, with a data directory that ends with it."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        places = {"QUOTA_LISTEN": "127.0.0.1:0", "QUOTA_HTTP_LISTEN": "127.0.0.1:0", "DATA_DIR": self.folder.name}
        self.process = subprocess.Popen([BINARY], env=places, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            said = json.loads(line)
            if said["message"].startswith("listening on "):
                self.grpc, self.http = said["message"].removeprefix("listening on "), said["http"]
                return
        raise AssertionError(f"{BINARY} ended with {self.process.wait()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate(timeout=30)
        self.folder.cleanup()

    def call(self, method, message, *, refused=False):
        """Calls a method of the contract with grpcurl."""
        command = [TOOLS / "grpcurl", "-plaintext", "-d", json.dumps(message), self.grpc, f"quotashare.v1.{method}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode != 0) == refused, f"{method}: {done.stdout}{done.stderr}"
