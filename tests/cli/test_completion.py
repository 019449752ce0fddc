"""Shell completion: the script that is printed completes commands, options and names in a real bash."""

import subprocess

import pytest

from dpbench.cli import main


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    pytest.importorskip("shtab", reason="shtab is not installed")
    path = tmp_path_factory.mktemp("completion") / "script"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["--print-completion", "bash"]) == 0
    return path


def test_bash_completes(script):
    for typed, completed in [
        ("re", "recommend report"),
        ("run memory_", "memory_accuracy memory_speed"),
        ("explain resnet15", "resnet152"),
        ("check --backend gh", "ghost"),
        ("epsilon --accountant p", "prv pld"),
        ("report --out", "--output"),
        ("compare --format j", "json"),
    ]:
        words = ["dpbench", *typed.split()]
        program = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_dpbench; echo "${COMPREPLY[*]}"'
        done = subprocess.run(["bash", "-c", program, script, *words], capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (completed, "")


@pytest.mark.parametrize("words", [["fish"], [], [""]])
def test_another_shell_is_one_line(words, capsys):
    assert main(["--print-completion", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("dpbench: expected a shell after --print-completion") and err.count("\n") == 1
