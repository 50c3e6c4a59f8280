"""The compose files of configs/: every command in them is one of ours and parses, and what it names is there."""

import json
import re
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from draftsmith.scripts import cli
from draftsmith.train.cli import parse_config

ROOT = Path(__file__).parents[2]
COMPOSE, TRAINING = (ROOT / "configs" / folder / "compose.yaml" for folder in ("serve", "cluster"))


def expanded(text: str) -> str:
    """Put in the defaults of variables, as compose does where none are set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.fixture(scope="module")
def services() -> dict:
    return yaml.safe_load(expanded(COMPOSE.read_text(encoding="utf-8")))["services"]


def port_of(service: dict) -> int:
    """The port that a service answers at, by its health check."""
    (found,) = re.findall(r"http://127\.0\.0\.1:(\d+)/health'", service["healthcheck"]["test"][-1])
    return int(found)


def test_three_services_wait_for_each_other_until_they_are_well(services):
    assert set(services) == {"draft-service", "target-service", "speculative-coordinator"}
    assert set(services["target-service"]["depends_on"]) == {"draft-service"}
    assert set(services["speculative-coordinator"]["depends_on"]) == {"draft-service", "target-service"}
    for service in services.values():
        assert service["healthcheck"]["test"][0] == "CMD"
        assert {each["condition"] for each in service.get("depends_on", {}).values()} <= {"service_healthy"}


@pytest.mark.parametrize("name", ["draft-service", "speculative-coordinator"])
def test_a_command_of_ours_parses_and_answers_where_its_health_is_asked(services, name):
    command, *flags = services[name]["command"]
    config = parse_config(cli.config_class(command, flags), flags)
    assert (config.host, config.port) == ("0.0.0.0", port_of(services[name]))


def test_the_coordinator_asks_the_target_which_asks_the_draft(services):
    _, *flags = services["speculative-coordinator"]["command"]
    config = parse_config(cli.config_class("coordinate"), flags)
    target, draft = services["target-service"], services["draft-service"]
    (endpoint,) = config.pairs[0].endpoints
    assert (urlsplit(endpoint).hostname, urlsplit(endpoint).port) == ("target-service", port_of(target))
    drafts = urlsplit(target["environment"]["DRAFT_ENDPOINT"])
    assert (drafts.hostname, drafts.port) == ("draft-service", port_of(draft))
    given = dict(flag.removeprefix("--").split("=", 1) for flag in target["command"])
    assert given["served-model-name"] in config.models
    assert int(given["port"]) == port_of(target)
    speculative = json.loads(given["speculative-config"])
    assert str(speculative["num_speculative_tokens"]) == target["environment"]["MAX_DRAFT_TOKENS"]
    module, _, name = speculative["model"].rpartition(".")
    assert speculative["method"] == "custom_class" and isinstance(getattr(import_module(module), name), type)


def test_models_have_gpus_of_their_own_and_no_port_is_open_to_the_network(services):
    devices = [
        device
        for name in ("draft-service", "target-service")
        for device in services[name]["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert [device["capabilities"] for device in devices] == [["gpu"]] * 2
    assert devices[0]["device_ids"] != devices[1]["device_ids"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_images_are_built_from_stages_that_are_there(services):
    for service in services.values():
        folder = (COMPOSE.parent / service["build"]["context"]).resolve()
        assert folder == ROOT
        stages = re.findall(r"^FROM .* AS (\w+)$", (folder / service["build"]["dockerfile"]).read_text(), re.M)
        assert service["build"]["target"] in stages


def test_a_drafter_is_trained_on_the_states_of_a_target_in_another_container(monkeypatch):
    monkeypatch.chdir(ROOT)
    services = yaml.safe_load(expanded(TRAINING.read_text(encoding="utf-8")))["services"]
    target, training = services["target-states"], services["training"]
    assert training["depends_on"] == {"target-states": {"condition": "service_healthy"}}
    (script,) = target["entrypoint"]
    assert (ROOT / script.removeprefix("/draftsmith/")).is_file()
    command, *flags = training["command"]
    launcher, fields = cli.launcher_flags(flags)
    config = parse_config(cli.config_class(command), [*fields, "--training.use_cpu", "true"])
    assert config.teacher == [f"vllm:http://target-states:{port_of(target)}"] and config.target == target["command"][0]
    states = target["environment"]["STATES"]
    assert any(mount.endswith(f":{states}") for mount in target["volumes"])
    devices = [service["deploy"]["resources"]["reservations"]["devices"][0] for service in (target, training)]
    serve, train = (device["device_ids"] for device in devices)
    assert [*serve, *train] == [str(gpu) for gpu in range(8)]
    assert (target["environment"]["GPUS"], launcher.processes) == (str(len(serve)), len(train))
    for service in services.values():
        assert re.fullmatch(r"\d+g", service["mem_limit"]) and not service.get("ports")
        assert (TRAINING.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
