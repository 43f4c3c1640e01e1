"""The program itself answers the chart's probes and takes the environment that the chart gives it."""

import subprocess
import tempfile
import unittest
import urllib.request
from pathlib import Path

from setting import BINARY, NO_BINARY, VALUES, Running, container, environment, rendered

TOKENS = "router-1 router " + 64 * "0" + "\n"


def mounted(folder):
    """Writes what Secrets hold into files below `folder`, as mounts would show them."""
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = {name: Path(folder, name) for name in ("tls.crt", "tls.key")}
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    command += [*subject, "-keyout", files["tls.key"], "-out", files["tls.crt"]]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    Path(folder, "ca.crt").write_bytes(files["tls.crt"].read_bytes())
    Path(folder, "tokens").write_text(TOKENS)


@unittest.skipUnless(BINARY.exists(), NO_BINARY)
class Program(unittest.TestCase):
    """Asked as a process, without a container."""

    def test_every_probe_is_answered(self):
        probes = [container(rendered(values))[name] for values in VALUES
                  for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        with Running() as server:
            for path in {probe["httpGet"]["path"] for probe in probes if "httpGet" in probe}:
                with urllib.request.urlopen(f"http://{server.http}{path}", timeout=10) as page:
                    self.assertEqual(page.status, 200, path)
            for service in {probe["grpc"]["service"] for probe in probes if "grpc" in probe}:
                command = [BINARY, "healthcheck", "--quota-listen", server.grpc, "--service", service]
                subprocess.run(command, check=True, capture_output=True, timeout=30)

    def test_the_environment_of_every_rendering_is_accepted(self):
        for values in VALUES:
            with self.subTest(values=values.name), tempfile.TemporaryDirectory() as folder:
                given = environment(rendered(values))
                mounted(folder)
                for name, value in given.items():
                    if value is None:
                        given[name] = "redis://redis:6379"
                    elif name.endswith("_FILE"):
                        given[name] = str(Path(folder, value.rpartition("/")[2]))
                done = subprocess.run([BINARY, "check"], env=given, capture_output=True, text=True, timeout=30, check=False)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn(f"QUOTA_STORE_DRIVER={given['QUOTA_STORE_DRIVER']}\n", done.stdout)


if __name__ == "__main__":
    unittest.main()
