"""The image is built from its recipe and runs without rights on a root file system that cannot be written.

Compiling in a container takes minutes and a network, so a folder with the program that is built already stands in for the first
stage, and Debian's C library for the base of the last one: tests/deploy has put it into a storage of its own under the
base's name. The container is a process in a mount namespace of its own, since that is all that can be had without a container runtime.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

from setting import BINARY, NO_BINARY, ROOT

STORE = os.environ.get("QUOTA_IMAGE_STORE")

# What a runtime does before it starts a container's program: $1 its root, $2 its volume, $3 its user, then its command.
START = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && mount --bind "$2" "$1/data" &&
exec setpriv --no-new-privs chroot --userspec="$3" "$1" "${@:4}"
"""


def buildah(*arguments):
    """Runs buildah on the storage of these checks; returns what it prints."""
    command = ["buildah", "--root", f"{STORE}/root", "--runroot", f"{STORE}/run", "--storage-driver", "vfs", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@unittest.skipUnless(BINARY.exists(), NO_BINARY)
@unittest.skipUnless(STORE, "skipped: there is no buildah, or no base image")
class Image(unittest.TestCase):
    """Built once for all of them."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        built = Path(cls.folder.name, "builder", "image")
        for folder in ("usr/local/bin", "etc/ssl/certs", "data"):
            (built / folder).mkdir(parents=True)
        shutil.copy(BINARY, built / "usr/local/bin/quota-share")
        (built / "etc/ssl/certs/ca-certificates.crt").write_text("")
        name = f"quota-share:{os.getpid()}"
        buildah("bud", "--isolation", "chroot", "--pull-never", "--build-context", f"builder={built.parent}",
                "--file", "deploy/Dockerfile", "--tag", name, ".")
        cls.addClassCleanup(buildah, "rmi", name)
        cls.config = json.loads(buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
        cls.container = buildah("from", "--pull-never", name)
        cls.addClassCleanup(buildah, "rm", cls.container)
        cls.root = Path(buildah("mount", cls.container))

    def start(self, volume, **more):
        """Starts the image's command as its user, on its own root file system, and waits until it listens."""
        user, command = self.config["User"], self.config["Entrypoint"]
        places = {"QUOTA_LISTEN": "127.0.0.1:0", "QUOTA_HTTP_LISTEN": "127.0.0.1:0"}
        given = dict(variable.split("=", 1) for variable in self.config["Env"]) | places | more
        start = ["unshare", "--mount", "--propagation", "private", "bash", "-c", START, "start", self.root, volume, user, *command]
        return subprocess.Popen(start, env=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def test_what_is_written_about_it(self):
        self.assertRegex(self.config["User"], r"^[1-9]\d*:[1-9]\d*$")
        self.assertEqual(set(self.config["ExposedPorts"]), {"50051/tcp", "9090/tcp"})
        self.assertEqual(set(self.config["Volumes"]), {"/data"})
        self.assertEqual(self.config["StopSignal"], "SIGTERM")
        self.assertEqual(self.config["Entrypoint"], ["/usr/local/bin/quota-share"])
        volume = (self.root / "data").stat()
        self.assertEqual(f"{volume.st_uid}:{volume.st_gid}", self.config["User"], "volumes take this owner over")
        self.assertEqual(os.listdir(self.root / "usr/local/bin"), ["quota-share"])

    def test_it_starts_serves_and_stops_without_rights(self):
        user = int(self.config["User"].partition(":")[0])
        with tempfile.TemporaryDirectory() as volume:
            os.chown(volume, *map(int, self.config["User"].split(":")))
            process = self.start(volume)
            said = json.loads(process.stderr.readline())["message"]
            self.assertRegex(said, r"^listening on ")
            status = Path(f"/proc/{process.pid}/status").read_text()
            self.assertEqual(set(re.search(r"^Uid:\t(.*)$", status, re.M)[1].split()), {str(user)})
            self.assertEqual(int(re.search(r"^CapEff:\t(\w+)$", status, re.M)[1], 16), 0)
            with self.assertRaisesRegex(OSError, "Read-only file system"):
                Path(f"/proc/{process.pid}/root/file").touch()
            asked = [BINARY, "healthcheck", "--quota-listen", said.removeprefix("listening on ")]
            subprocess.run(asked, check=True, capture_output=True, timeout=30)
            process.send_signal(signal.SIGTERM)
            self.assertIn("stopped", process.communicate(timeout=30)[1])
            self.assertEqual(process.returncode, 0)
            written = list(Path(volume).iterdir())
            self.assertIn("storage.sqlite", [path.name for path in written])
            self.assertEqual({path.stat().st_uid for path in written}, {user})

    def test_it_does_not_serve_the_world_unless_told_to(self):
        with tempfile.TemporaryDirectory() as volume:
            process = self.start(volume, QUOTA_LISTEN="0.0.0.0:0")
            self.assertIn("QUOTA_INSECURE", process.communicate(timeout=30)[1])
            self.assertEqual(process.returncode, 2)


if __name__ == "__main__":
    unittest.main()
