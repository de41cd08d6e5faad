"""Sittings of a small run on fake workers, as a user starts and resumes them."""

import json

from rl_parity import cli

SMALL = ["--batch", "2", "--group", "2", "--max-new-tokens", "4", "--device", "cpu"]


def start(out, *options):
    return cli.main(["run", "--out", str(out), *SMALL, *options])


def resume(out, *options):
    return cli.main(["run", "--resume", str(out), *options])


def killed(out):
    """As a run that was killed leaves its manifest."""
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["finished"]
    (out / "manifest.json").write_text(json.dumps({**manifest, "status": "running", "files_sha256": {}}))


def contents(root):
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def edited(path, **changes):
    data = json.loads(path.read_text())
    for name, value in changes.items():
        *above, last = name.split("__")
        at = data
        for key in above:
            at = at[key]
        at[last] = value
    path.write_text(json.dumps(data))
