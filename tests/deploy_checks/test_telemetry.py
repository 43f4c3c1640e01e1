"""Alerts and the dashboard ask for metrics that there are."""

import json
import re
import subprocess
import unittest
import urllib.request

import yaml

from setting import BINARY, DEPLOY, NO_BINARY, TOOLS, Running

ALERTS = DEPLOY / "prometheus" / "alerts.yaml"


def dashboard():
    """The dashboard, as Grafana takes it."""
    return json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())


def panels():
    """The panels that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def alerts():
    """Every alert."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries():
    """Every query to Prometheus, by where it stands."""
    found = {rule["alert"]: rule["expr"] for rule in alerts()}
    for panel in panels():
        for target in panel["targets"]:
            found[f"{panel['title']}, {target['refId']}"] = target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found[f"${variable['name']}"] = re.sub(r"label_values\((.*), \w+\)", r"\1", variable["definition"])
    return found


def promtool(*arguments, given=None):
    """Runs promtool; its end is the caller's to judge."""
    command = [TOOLS / "promtool", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)


def scrape():
    """What a server on which every kind of call has been made says of itself."""
    pool = {"name": "p", "provider": "kimi", "connection_ids": ["c"], "allocations": [{"api_key_id": "k", "weight": 1}]}
    with Running() as server:
        server.call("PoolAdmin/CreatePool", {"pool": pool})
        server.call("QuotaShare/Enforce", {"api_key_id": "k", "connection_id": "c"})
        server.call("QuotaShare/Enforce", {}, refused=True)
        server.call("QuotaShare/RecordConsumption", {"api_key_id": "k", "connection_id": "c"})
        with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=10) as page:
            return page.read().decode()


@unittest.skipUnless((TOOLS / "promtool").exists(), "skipped: promtool is not in target/tools; tests/run installs it")
class Prometheus(unittest.TestCase):
    """What Prometheus itself says of the rules."""

    def test_the_rules_are_valid(self):
        done = promtool("check", "rules", ALERTS)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_each_alert_fires_where_it_should_and_is_silent_where_it_should(self):
        done = promtool("test", "rules", ALERTS.with_name("alerts.test.yaml"))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_query_of_the_dashboard_is_one(self):
        for place, query in queries().items():
            with self.subTest(place=place):
                query = re.sub(r"\$__(rate_interval|range)\b", "5m", query)
                rules = {"groups": [{"name": "dashboard", "rules": [{"record": "query", "expr": query}]}]}
                done = promtool("check", "rules", "/dev/stdin", given=json.dumps(rules))
                self.assertEqual(done.returncode, 0, f"{query}: {done.stdout}{done.stderr}")


class Alerts(unittest.TestCase):
    """What an alert says."""

    def test_every_alert_says_how_urgent_it_is_and_what_to_do(self):
        for alert in alerts():
            with self.subTest(alert=alert["alert"]):
                self.assertIn(alert["labels"]["severity"], ("critical", "warning"))
                self.assertEqual(set(alert["annotations"]), {"summary", "description"})

    def test_every_alert_is_tested(self):
        tests = ALERTS.with_name("alerts.test.yaml").read_text()
        self.assertEqual([alert["alert"] for alert in alerts() if f'"{alert["alert"]}"' not in tests], [])


class Dashboard(unittest.TestCase):
    """What a dashboard has to be for Grafana to show it."""

    def test_panels_have_numbers_of_their_own_and_lie_beside_each_other(self):
        self.assertEqual(len({panel["id"] for panel in dashboard()["panels"]}), len(dashboard()["panels"]))
        taken = set()
        for panel in dashboard()["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            self.assertLessEqual(at["x"] + at["w"], 24)
            self.assertFalse(cells & taken, panel["title"])
            taken |= cells

    def test_every_panel_explains_itself(self):
        for panel in panels():
            self.assertTrue(panel["description"], panel["title"])

    def test_every_variable_of_a_query_is_one_of_the_dashboard(self):
        names = {variable["name"] for variable in dashboard()["templating"]["list"]} | {"__rate_interval", "__range"}
        for place, query in queries().items():
            self.assertLessEqual(set(re.findall(r"\$(\w+)", query)), names, place)


@unittest.skipUnless(BINARY.exists(), NO_BINARY)
class Metrics(unittest.TestCase):
    """What a running server says of itself, against what is asked for."""

    @classmethod
    def setUpClass(cls):
        cls.page = scrape()
        cls.names = set(re.findall(r"^(\w+)\{?", cls.page, re.M))

    def test_every_metric_that_is_asked_for_is_there(self):
        for place, query in queries().items():
            asked = set(re.findall(r"\bquota_share_\w+", query))
            self.assertTrue(asked, place)
            self.assertEqual(asked - self.names, set(), place)

    def test_every_label_that_is_asked_for_is_there(self):
        for place, query in queries().items():
            for metric, selectors in re.findall(r"\b(quota_share_\w+)\{([^}]*)\}", query):
                (series, *_) = re.findall(rf"^{metric}\{{?(.*?)\}}? ", self.page, re.M)
                there = set(re.findall(r"(\w+)=", series)) | {"instance", "job"}
                self.assertLessEqual(set(re.findall(r"(\w+)[!=]?[=~]", selectors)), there, f"{place}: {metric}")


if __name__ == "__main__":
    unittest.main()
