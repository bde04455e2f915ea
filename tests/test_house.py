"""The house itself: what is committed names no address of a registry, module maps are whole, and the built wheel works elsewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "collector", "router", "simulator", "dashboard")
# Joined here, so that this file does not hold them itself.
REGISTRY_HOSTS = [".".join(p) for p in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("repo1", "maven"), ("crates", "io"))]


def committed_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what is committed cannot be listed")
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [ROOT / name for name in out.split("\0") if name and (ROOT / name).is_file()]


def test_no_committed_file_names_a_registry_host():
    found = []
    for path in committed_files():
        text = path.read_bytes()
        found += [f"{path.relative_to(ROOT)}: {host}" for host in REGISTRY_HOSTS if host.encode() in text]
    assert not found


def test_no_committed_file_is_over_a_megabyte():
    assert [p.name for p in committed_files() if p.stat().st_size > 1_000_000] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_stands_in_its_packages_readme(package):
    missing = []
    for module in sorted((ROOT / package).rglob("*.py")):
        readme = next(p / "README.md" for p in module.parents if (p / "README.md").exists())
        if module.name != "__init__.py" and not re.search(rf"\b{module.stem}\b", readme.read_text()):
            missing.append(f"{module.relative_to(ROOT)} is not in {readme.relative_to(ROOT)}")
    assert (ROOT / package / "README.md").exists()
    assert not missing


def test_every_make_target_is_explained():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", text, re.M).group(1).split())
    assert targets == set(re.findall(r"^([a-z-]+):.*## ", text, re.M))


def test_the_built_wheel_runs_outside_the_checkout(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", format="zip")
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    code = (
        "import warmwatch, schemas, simulator, dashboard\n"
        "from schemas.tables.published import macros_sql\n"
        "from router.prompts.tokens import LocalTokenizer\n"
        "from pathlib import Path\n"
        "assert 'CREATE MACRO' in macros_sql()\n"
        "assert len(LocalTokenizer.from_dir(Path(simulator.__file__).parent / 'tokenizer').text('hello')) > 0\n"
        "assert list((Path(dashboard.__file__).parent / 'sql').glob('*.sql'))\n"
        "print(schemas.__file__)\n"
        "raise SystemExit(warmwatch.main(['--help']))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path / "site"))
    assert "collect" in run.stdout
