"""The Dockerfile, the compose file and the service config say the same as the program, the chart and each other."""

import json
import re
import shlex
import tomllib
import unittest
from functools import reduce

import yaml

from setting import (
    CHART,
    DEPLOY,
    VALUES,
    container,
    environment,
    helm,
    is_known,
    of_kind,
    pod,
    rendered,
    services,
    stop_seconds_max,
    text,
)

CARGO = tomllib.loads(text("Cargo.toml"))["package"]


def instructions():
    """The Dockerfile's lines by instruction, continued lines joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text("deploy/Dockerfile"), flags=re.M)).splitlines()
    found = {}
    for line in filter(None, lines):
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(re.sub(r"\s+", " ", rest.strip()))
    return found


class Versions(unittest.TestCase):
    """One version of the program, one of the compiler."""

    def test_the_chart_and_the_compose_file_name_the_version_of_the_program(self):
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        compose = yaml.safe_load(text("deploy/compose.yaml"))["services"]["quota-share"]
        self.assertEqual(chart["appVersion"], CARGO["version"])
        self.assertEqual(values["image"]["tag"], CARGO["version"])
        self.assertEqual(compose["image"], f"quota-share:{CARGO['version']}")

    def test_the_image_is_built_by_the_compiler_that_the_program_asks_for(self):
        self.assertIn(f"BUILDER=rust:{CARGO['rust-version']}-slim-bookworm", instructions()["ARG"])


class Dockerfile(unittest.TestCase):
    """What the image is, as far as its recipe says."""

    def test_bases_are_named_by_a_tag_of_the_same_debian(self):
        bases = dict(argument.split("=") for argument in instructions()["ARG"])
        self.assertEqual(instructions()["FROM"], ["${BUILDER} AS builder", "${RUNTIME}"])
        for base in bases.values():
            self.assertRegex(base, r"^[a-z]+:\S*bookworm\S*$")

    def test_the_chart_runs_the_user_and_the_ports_of_the_image(self):
        for values in VALUES:
            context, ports = pod(rendered(values))["securityContext"], container(rendered(values))["ports"]
            self.assertEqual(instructions()["USER"], [f"{context['runAsUser']}:{context['runAsGroup']}"])
            self.assertEqual(instructions()["EXPOSE"], [" ".join(str(port["containerPort"]) for port in ports)])
            self.assertEqual(instructions()["VOLUME"], [environment(rendered(values))["DATA_DIR"]])

    def test_every_variable_is_one_that_the_program_knows(self):
        names = re.findall(r"(\w+)=", " ".join(instructions()["ENV"]))
        self.assertEqual([name for name in names if not is_known(name)], [])
        self.assertNotIn("QUOTA_INSECURE", names)

    def test_what_the_build_needs_is_let_through(self):
        let_through = {line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")}
        self.assertLessEqual({"Cargo.toml", "Cargo.lock", "build.rs", "migrations", "proto", "src"}, let_through)
        self.assertNotIn("target", let_through)


class Compose(unittest.TestCase):
    """What the compose file starts on a laptop."""

    services = yaml.safe_load(text("deploy/compose.yaml"))["services"]

    def test_nothing_is_open_beyond_this_machine(self):
        for service in self.services.values():
            for port in service.get("ports", []):
                self.assertRegex(port, r"^127\.0\.0\.1:\d+:\d+$")

    def test_images_are_named_by_a_version(self):
        for service in self.services.values():
            self.assertRegex(service["image"], r"^[a-z-]+:\d[\w.-]*$")

    def test_redis_keeps_what_it_has_and_drops_nothing(self):
        command = self.services["redis"]["command"]
        flags = dict(zip(command[1::2], command[2::2], strict=True))
        self.assertEqual((flags["--appendonly"], flags["--maxmemory-policy"]), ("yes", "noeviction"))

    def test_the_service_has_no_more_rights_than_in_kubernetes(self):
        service = self.services["quota-share"]
        self.assertTrue(service["read_only"])
        self.assertEqual((service["cap_drop"], service["security_opt"]), (["ALL"], ["no-new-privileges:true"]))
        self.assertEqual({"data:/data"}, set(service["volumes"]))

    def test_every_variable_is_one_that_the_program_knows(self):
        self.assertEqual([name for name in self.services["quota-share"]["environment"] if not is_known(name)], [])

    def test_a_stop_ends_before_it_is_cut_off(self):
        grace = self.services["quota-share"]["stop_grace_period"]
        self.assertGreaterEqual(int(grace.removesuffix("s")), stop_seconds_max())


class Guide(unittest.TestCase):
    """What README.md tells people to type, and where it sends them."""

    text = text("deploy/README.md")

    def test_every_link_leads_somewhere(self):
        for target in re.findall(r"\]\((?!https:)([^)#]+)", self.text):
            self.assertTrue((DEPLOY / target).exists(), target)

    def test_every_installation_renders(self):
        commands = re.findall(r"^helm install (.*)$", self.text.replace("\\\n", ""), re.M)
        self.assertEqual(len(commands), 2)
        for command in commands:
            done = helm("template", *[word for word in shlex.split(command) if word != "--create-namespace"])
            self.assertEqual(done.returncode, 0, f"{command}: {done.stderr}")

    def test_every_value_that_is_named_is_one(self):
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        named = [path for path in re.findall(r"`([a-z]\w*(?:\.\w+)*)`", self.text) if path.split(".")[0] in values]
        self.assertGreater(len(named), 5)
        for path in named:
            with self.subTest(value=path):
                reduce(lambda inner, name: inner[name], path.split("."), values)

    def test_the_names_of_services_are_those_of_the_chart(self):
        services_made = {each["metadata"]["name"] for each in of_kind(rendered(DEPLOY / "values" / "production.yaml"), "Service")}
        named = re.findall(r"(?:dns:///| service/|`)([\w-]+)(?:\.quota-share[:`]| 50051)", self.text)
        self.assertGreater(len(named), 2)
        for name in named:
            self.assertIn(name, services_made)


def seconds(duration):
    """The length of a duration as gRPC writes it in JSON."""
    return float(re.fullmatch(r"(\d+(?:\.\d+)?)s", duration)[1])


class ServiceConfig(unittest.TestCase):
    """What clients are told about calling several replicas."""

    config = json.loads((DEPLOY / "service-config.json").read_text())

    def method_of(self, service, method=None):
        """The entry for exactly this name."""
        name = {"service": service} | ({"method": method} if method else {})
        (found,) = [each for each in self.config["methodConfig"] if name in each["name"]]
        return found

    def test_every_name_is_one_of_the_contract_and_every_service_has_one(self):
        names = [name for entry in self.config["methodConfig"] for name in entry["name"]]
        for name in names:
            self.assertIn(name.get("method", next(iter(services()[name["service"]]))), services()[name["service"]])
        self.assertEqual({name["service"] for name in names}, set(services()))

    def test_calls_go_round_the_replicas_and_wait_for_one(self):
        self.assertEqual(self.config["loadBalancingConfig"], [{"round_robin": {}}])
        self.assertTrue(all(entry["waitForReady"] for entry in self.config["methodConfig"]))

    def test_only_what_has_its_effect_once_is_tried_again_and_within_its_time(self):
        for entry in self.config["methodConfig"]:
            if retry := entry.get("retryPolicy"):
                self.assertEqual({name["service"] for name in entry["name"]}, {"quotashare.v1.QuotaShare"})
                self.assertEqual((retry["maxAttempts"], retry["retryableStatusCodes"]), (3, ["UNAVAILABLE"]))
                self.assertLess(2 * seconds(retry["maxBackoff"]), seconds(entry["timeout"]))
                self.assertLessEqual(seconds(retry["initialBackoff"]), seconds(retry["maxBackoff"]))
        for method in ("Enforce", None):
            self.assertIn("retryPolicy", self.method_of("quotashare.v1.QuotaShare", method))

    def test_a_timeout_outlasts_what_some_clients_take_off(self):
        # Clients on gRPC's core library (Python, C++, Ruby, PHP) count it from up to 2 s before the call (grpc/grpc#34547).
        for entry in self.config["methodConfig"]:
            self.assertGreaterEqual(seconds(entry.get("timeout", "5s")), 5)

    def test_what_streams_has_no_end(self):
        for service, methods in services().items():
            for method, streams in methods.items():
                if streams:
                    self.assertNotIn("timeout", self.method_of(service, method))


if __name__ == "__main__":
    unittest.main()
