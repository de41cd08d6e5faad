"""What may be done to the files of a run, and how it is refused."""

import json
import shutil

from rl_parity import cli
from rl_parity.bound import file_digests
from rl_parity.rundir import RunDirectory, summarize, write_json

SMALL = ["--batch", "2", "--group", "2", "--max-new-tokens", "4", "--device", "cpu"]
STEPS = 4


def records(out, change, arm="strict"):
    path = out / arm / "steps.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    found = change(found) or found
    path.write_text("".join(json.dumps(record) + "\n" for record in found))


def one(step, **figures):
    return lambda out: records(out, lambda found: found[step].update(figures))


def manifest(**changes):
    def change(out):
        found = {**json.loads((out / "manifest.json").read_text()), **changes}
        write_json(out / "manifest.json", {k: v for k, v in found.items() if v is not ...})

    return change


def ledger(keep):
    def change(out):
        path = out / "strict" / "ledger.jsonl"
        path.write_text("".join(line for line in path.read_text().splitlines(True) if keep(json.loads(line))))

    return change


def cut(name, last):
    return lambda out: (out / name).write_text((out / name).read_text()[:-last])


def without(*steps):
    """Records and samples, as if these steps had never been; the summary is recounted."""

    def change(out):
        records(out, lambda found: [r for r in found if r["step"] not in steps])
        for step in steps:
            RunDirectory(out).samples_path("strict", step).unlink()

    return change


def swapped(out):
    records(out, lambda found: [found[0], found[2], found[1], found[3]])


def evidence(change, arm="strict"):
    def edit(out):
        path = out / arm / "evidence.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return edit


def kernels(name):
    def change(found):
        for rows in (*found["train"].values(), *found["rollout"].values()):
            rows[:] = [{**row, "kernel": name} for row in rows]

    return change


def pushes(change):
    def edit(out):
        path = out / "strict" / "sync.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return edit


def of_native(out):
    shutil.copy(out / "native" / "evidence.json", out / "strict" / "evidence.json")


def summary(**changes):
    def change(out):
        found = json.loads((out / "summary.json").read_text())
        found["arms"]["strict"] |= changes
        write_json(out / "summary.json", found)

    return change


def recount(out):
    path = out / "summary.json"
    found = json.loads(path.read_text())
    for arm, totals in found["arms"].items():
        found["arms"][arm] = {**totals, **summarize(RunDirectory(out).steps(arm), totals["seconds"])}
    write_json(path, found)


def fitted(out):
    """The manifest's digests, made to fit what the files hold now."""
    manifest(files_sha256=file_digests(RunDirectory(out)))(out)


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def refused(out, words, capsys, *, resumes):
    """By report, and by resume before anything starts; nothing is changed."""
    (out / "report.html").unlink(missing_ok=True)
    before = contents(out)
    for command in (["report", str(out)], ["run", "--resume", str(out), "--steps", "5"]):
        if command[0] == "report" or resumes:
            assert cli.main(command) == 2
            said = capsys.readouterr().err
            assert (resumes if command[0] == "run" and isinstance(resumes, str) else words) in said, said
    assert contents(out) == before
