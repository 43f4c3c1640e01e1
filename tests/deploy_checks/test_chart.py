"""The chart renders what Kubernetes accepts, and what no schema knows: that names and numbers in it mean each other."""

import functools
import re
import unittest
from pathlib import Path

import kubernetes_validate
import yaml

from setting import (
    CHART,
    DEPLOY,
    VALUES,
    container,
    environment,
    helm,
    is_known,
    known_variables,
    of_kind,
    pod,
    rendered,
    rendered_text,
    services,
    stateful_set,
    stop_seconds_max,
    template,
    text,
)

# Kinds of which kubernetes-validate has no schema.
CUSTOM = {"ServiceMonitor"}


def newest_versions(count):
    """The newest versions of Kubernetes that kubernetes-validate knows, as "1.37"."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    known = {tuple(map(int, found)) for each in folder.iterdir() if (found := re.findall(r"\d+", each.name)[:2])}
    return [f"{major}.{minor}" for major, minor in sorted(known)[-count:]]


def each_rendering(promise):
    """A test that asks a promise of what the chart renders with each file of values."""

    @functools.wraps(promise)
    def test(self):
        for values in VALUES:
            with self.subTest(values=values.name):
                promise(self, rendered(values))

    return test


class Rendered(unittest.TestCase):
    """What holds of the chart whatever the values are."""

    def test_lint_finds_nothing(self):
        for values in VALUES:
            with self.subTest(values=values.name):
                done = helm("lint", "--strict", CHART, "--values", values)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    @each_rendering
    def test_the_newest_versions_of_kubernetes_accept_every_object(self, objects):
        versions = newest_versions(3)
        self.assertEqual(len(versions), 3)
        for each in objects:
            for version in versions if each["kind"] not in CUSTOM else []:
                with self.subTest(kind=each["kind"], version=version):
                    kubernetes_validate.validate(each, version, strict=True)

    def test_every_kind_is_rendered_by_some_values(self):
        kinds = {each["kind"] for values in VALUES for each in rendered(values)}
        templates = {path.stem.removesuffix("s") for path in (CHART / "templates").glob("*.yaml")}
        self.assertEqual({kind.lower() for kind in kinds}, templates - {"refusal"})

    @each_rendering
    def test_no_rights_are_left_to_a_replica(self, objects):
        of_pod, of_container = pod(objects)["securityContext"], container(objects)["securityContext"]
        self.assertTrue(of_pod["runAsNonRoot"])
        self.assertGreater(min(of_pod["runAsUser"], of_pod["runAsGroup"], of_pod["fsGroup"]), 0)
        self.assertEqual(of_pod["seccompProfile"], {"type": "RuntimeDefault"})
        self.assertTrue(of_container["readOnlyRootFilesystem"])
        self.assertFalse(of_container["allowPrivilegeEscalation"])
        self.assertEqual(of_container["capabilities"], {"drop": ["ALL"]})
        self.assertFalse(pod(objects)["automountServiceAccountToken"])
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            self.assertNotIn(key, pod(objects))

    @each_rendering
    def test_the_image_is_named_by_a_version(self, objects):
        self.assertRegex(container(objects)["image"], r"^[^:@]+:[^:@]+(@sha256:[0-9a-f]{64})?$")
        self.assertNotIn(":latest", container(objects)["image"])

    @each_rendering
    def test_a_replica_asks_for_what_it_needs_and_is_bounded(self, objects):
        for bound in ("requests", "limits"):
            self.assertEqual(set(container(objects)["resources"][bound]), {"cpu", "memory"})

    @each_rendering
    def test_every_port_that_is_named_is_one_of_the_container(self, objects):
        ports = {port["name"]: port["containerPort"] for port in container(objects)["ports"]}
        used = [port["targetPort"] for service in of_kind(objects, "Service") for port in service["spec"]["ports"]]
        for policy in of_kind(objects, "NetworkPolicy"):
            used += [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            used += [how["port"] for how in container(objects)[probe].values() if isinstance(how, dict)]
        for port in used:
            self.assertIn(port, {*ports, *ports.values()})
        listening = {name: environment(objects)[variable].rpartition(":")[2]
                     for name, variable in (("grpc", "QUOTA_LISTEN"), ("http", "QUOTA_HTTP_LISTEN"))}
        self.assertEqual({name: str(port) for name, port in ports.items()}, listening)

    @each_rendering
    def test_a_headless_service_has_the_ports_of_the_pods_themselves(self, objects):
        ports = {port["name"]: port["containerPort"] for port in container(objects)["ports"]}
        (headless,) = [each for each in of_kind(objects, "Service") if each["spec"].get("clusterIP") == "None"]
        self.assertEqual({port["name"]: port["port"] for port in headless["spec"]["ports"]}, ports)
        self.assertEqual(stateful_set(objects)["spec"]["serviceName"], headless["metadata"]["name"])

    @each_rendering
    def test_probes_ask_what_is_there(self, objects):
        probes = {name: container(objects)[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        for probe in probes.values():
            if "grpc" in probe:
                self.assertIn(probe["grpc"]["service"], {"", *services()})
                self.assertTrue(environment(objects)["QUOTA_LISTEN"].endswith(f":{probe['grpc']['port']}"))
                self.assertNotIn("QUOTA_TLS_CERT_FILE", environment(objects), "a gRPC probe speaks no TLS")
            else:
                self.assertIn(f'"{probe["httpGet"]["path"]}"', text("src/transport/http.rs"))
                self.assertEqual(probe["httpGet"]["port"], "http")
        # A replica that is not ready is not healed by a restart.
        for name in ("startupProbe", "livenessProbe"):
            self.assertEqual(probes[name]["httpGet"]["path"], "/livez")
        self.assertNotEqual(probes["readinessProbe"], probes["livenessProbe"])

    @each_rendering
    def test_selectors_select_the_replicas(self, objects):
        whole = stateful_set(objects)["spec"]
        labels = whole["template"]["metadata"]["labels"]
        selectors = [each["spec"]["selector"] for each in of_kind(objects, "Service")]
        selectors += [each["spec"]["podSelector"]["matchLabels"] for each in of_kind(objects, "NetworkPolicy")]
        selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(objects, "PodDisruptionBudget")]
        selectors += [each["labelSelector"]["matchLabels"] for each in pod(objects).get("topologySpreadConstraints", [])]
        for selector in [*selectors, whole["selector"]["matchLabels"]]:
            self.assertTrue(selector.items() <= labels.items(), f"{selector} of {labels}")

    @each_rendering
    def test_prometheus_scrapes_each_replica_once(self, objects):
        for monitor in of_kind(objects, "ServiceMonitor"):
            selector = monitor["spec"]["selector"]["matchLabels"].items()
            found = [each for each in of_kind(objects, "Service") if selector <= each["metadata"]["labels"].items()]
            self.assertEqual(len(found), 1)
            ports = {port["name"] for port in found[0]["spec"]["ports"]}
            for endpoint in monitor["spec"]["endpoints"]:
                self.assertIn(endpoint["port"], ports)

    @each_rendering
    def test_every_variable_is_one_that_the_program_knows_and_set_once(self, objects):
        names = [variable["name"] for variable in container(objects)["env"]]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual([name for name in names if not is_known(name)], [])

    @each_rendering
    def test_every_file_that_a_variable_names_is_mounted(self, objects):
        volumes = {volume["name"]: volume for volume in pod(objects)["volumes"]}
        claims = {claim["metadata"]["name"] for claim in stateful_set(objects)["spec"]["volumeClaimTemplates"]}
        mounts = {mount["mountPath"]: mount for mount in container(objects)["volumeMounts"]}
        self.assertEqual({mount["name"] for mount in mounts.values()}, {*volumes, *claims})
        self.assertIn(mounts[environment(objects)["DATA_DIR"]]["name"], claims)
        for name, value in environment(objects).items():
            if name.endswith("_FILE"):
                folder, _, file = value.rpartition("/")
                self.assertTrue(mounts[folder]["readOnly"], name)
                self.assertNotIn("subPath", mounts[folder], "a file that is mounted alone never changes")
                items = volumes[mounts[folder]["name"]]["secret"].get("items")
                self.assertIn(file, [item["path"] for item in items or []] if items else TLS_KEYS)

    def test_every_secret_is_one_of_the_values_or_rendered(self):
        for values in VALUES:
            with self.subTest(values=values.name):
                objects = rendered(values)
                given = {value for key, value in leaves(yaml.safe_load(values.read_text())) if key.endswith("Secret")}
                made = {each["metadata"]["name"]: set(each["stringData"]) for each in of_kind(objects, "Secret")}
                for name, key in secrets(objects):
                    self.assertIn(name, {*given, *made})
                    self.assertTrue(name in given or key in made[name], f"{name} has no {key}")

    @each_rendering
    def test_a_stop_ends_before_it_is_cut_off(self, objects):
        sleep = container(objects).get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})["preStop"]["sleep"]["seconds"]
        self.assertGreaterEqual(pod(objects)["terminationGracePeriodSeconds"], sleep + stop_seconds_max())

    @each_rendering
    def test_replicas_start_together_and_are_replaced_one_by_one(self, objects):
        whole = stateful_set(objects)["spec"]
        self.assertEqual((whole["podManagementPolicy"], whole["updateStrategy"]), ("Parallel", {"type": "RollingUpdate"}))

    @each_rendering
    def test_what_scales_the_replicas_is_alone_in_it(self, objects):
        scalers = of_kind(objects, "HorizontalPodAutoscaler")
        self.assertEqual("replicas" in stateful_set(objects)["spec"], not scalers)
        for scaler in scalers:
            target = scaler["spec"]["scaleTargetRef"]
            self.assertEqual((target["kind"], target["name"]), ("StatefulSet", stateful_set(objects)["metadata"]["name"]))

    def test_the_manifests_are_what_the_chart_renders_today(self):
        for values in sorted((DEPLOY / "values").glob("*.yaml")):
            with self.subTest(values=values.name):
                manifest = DEPLOY / "manifests" / values.name
                self.assertTrue(manifest.exists(), f"{manifest} is missing: run tests/deploy --render")
                self.assertEqual(manifest.read_text(), rendered_text(values), "run tests/deploy --render")


# The keys of a Secret of type kubernetes.io/tls, and the one beside them for the CA of callers.
TLS_KEYS = ["tls.crt", "tls.key", "ca.crt"]


def leaves(values, key=""):
    """Every value that is no map, with its key."""
    if not isinstance(values, dict):
        return [(key, values)]
    return [leaf for name, value in values.items() for leaf in leaves(value, name)]


def secrets(objects):
    """Every Secret that a replica needs, with the key in it."""
    references = [variable["valueFrom"]["secretKeyRef"] for variable in container(objects)["env"] if "valueFrom" in variable]
    found = [(reference["name"], reference["key"]) for reference in references]
    for volume in pod(objects)["volumes"]:
        if secret := volume.get("secret"):
            found += [(secret["secretName"], item["key"]) for item in secret.get("items", [{"key": "tls.crt"}])]
    return found


class Refused(unittest.TestCase):
    """What cannot work is refused before it reaches a cluster, with a sentence that says what to do."""

    # What is set | what is said
    CASES = [
        ([], "auth: nobody would be authenticated: set auth.existingSecret or auth.callers"),
        (["auth.insecure=true", "replicas=3"], "store.driver: sqlite counts in the volume of one replica: set store.driver=redis"),
        (["auth.insecure=true", "autoscaling.enabled=true"], "or replicas=1 without autoscaling"),
        (["auth.insecure=true", "store.driver=redis"], "store.redis: the driver redis needs a URL"),
        (["auth.insecure=true", "store.driver=redis", "store.redis.url=redis://r", "store.redis.existingSecret=s"],
         "store.redis: both url and existingSecret are set"),
        (["auth.insecure=true", "store.driver=redis", "store.redis.url=mongo://:hidden@host"], "store.redis.url is no URL of a Redis"),
        (["auth.insecure=true", "store.driver=mongo"], "/store/driver"),
        (["auth.insecure=true", "image.tag=latest"], 'image.tag: "latest" does not say which version runs'),
        (["auth.insecure=true", "image.tag="], 'image.tag: "" does not say which version runs'),
        (["auth.callers={hidden}"], "auth.callers[0] is no line of a file of callers: set it to NAME ROLE SHA256"),
        (["auth.callers={a owner " + 64 * "0" + "}"], "where ROLE is router, viewer or admin"),
        (["auth.callers={a admin " + 64 * "0" + "}", "auth.existingSecret=s"], "auth: both callers and existingSecret are set"),
        (["auth.existingSecret=s", "auth.insecure=true"], "auth.insecure: callers are authenticated, so it must be false"),
        (["tls.clientCertificates=required"], "tls.clientCertificates: they need TLS: set tls.existingSecret"),
        (["tls.existingSecret=s", "tls.clientCertificates=optional"], "optional lets in who has a token, and there are none"),
        (["auth.existingSecret=s", "autoscaling.enabled=true", "autoscaling.minReplicas=9", "store.driver=redis",
          "store.redis.existingSecret=s"], "autoscaling.minReplicas: 9 is more than maxReplicas, 6"),
        (["auth.insecure=true", "env.QUOTA_STORE_TIMEOUT=5"], "'QUOTA_STORE_TIMEOUT' not allowed"),
        (["auth.insecure=true", "env.DATA_DIR=/tmp"], "'DATA_DIR' not allowed"),
        (["auth.insecure=true", "replica=1"], "'replica' not allowed"),
    ]

    def test_each_mistake_is_named_and_no_secret_shown(self):
        for given, said in self.CASES:
            with self.subTest(given=given):
                done = template(*(part for each in given for part in ("--set", each)))
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(said, done.stderr)
                self.assertNotIn("hidden", done.stderr)

    def test_a_grace_period_is_refused_exactly_if_a_stop_may_take_longer(self):
        bound_seconds = int(stop_seconds_max())
        for grace_seconds, accepted in ((bound_seconds + 2, False), (bound_seconds + 3, True)):
            done = template("--set", f"auth.insecure=true,preStopSleepSeconds=3,terminationGracePeriodSeconds={grace_seconds}")
            self.assertEqual(done.returncode == 0, accepted, f"{grace_seconds} s, a stop takes 3 + {bound_seconds}: {done.stderr}")

    def test_what_can_be_given_in_env_is_what_the_chart_leaves_open(self):
        properties = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]["env"]["properties"]
        set_by_chart = {name for values in VALUES for name in environment(rendered(values))} - set(properties)
        self.assertEqual(set(properties), known_variables() - set_by_chart)


if __name__ == "__main__":
    unittest.main()
