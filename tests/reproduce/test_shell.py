"""The reader of shell scripts compared with bash, and hostile scripts."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from encore.lab.submissions.shell_expansion import LONGEST_CUT, LONGEST_PATTERN, LONGEST_VALUE, State
from encore.lab.submissions.shell_interpreter import Reader
from encore.lab.submissions.shell_lexer import ShellError

SCRIPTS = {
    "quotes": """A=one B='two  words' C="$A and ${B}" D=a\\ b E="a\\"b\\$A" F='' G=$A"$B"'$A'""",
    "comments": "A=1 # not this\n# B=2\nC=a#b",
    "defaults": "A=${X:-5}; B=${X-6}; Y=; C=${Y:-7} D=${Y-8} E=${X:+9} Y=1; F=${Y:+9}; : ${G:=4} \"${H:=5}\"",
    "export": "export A=1\nexport B\nB=2\ndeclare -x C=3\nreadonly D=4",
    "continuation": 'A="one \\\n  two"\nB=a\\\nb',
    "arithmetic": "N=7; F=$(( )) A=$((N * 3 + 1)) B=$(( -7 / 2 )) C=$((-7 % 3)) D=$(($N/2)) E=$((N > 3))",
    "arrays": 'P=(a "b c" d); P+=(--x 1); A="${P[@]}" B=${#P[@]} Q=(); C="<${Q[@]}>"',
    "cuts": "F=config_DGX_all.sh; A=${F%.sh} B=${F#config_} C=${F/_all*/} D=${F%%_*} E=${F##*_} G=${F//_/-} H=${F/_/-}",
    "conditions": "S=DGXA100\nif [[ $S == DGX2* ]]; then A=1; elif [ \"$S\" = DGXA100 ]; then A=2; else A=3; fi\n"
    "if [[ ! -z $S && ( 3 -gt 2 || $S == x ) ]]; then B=1; fi\n[ -n \"$X\" ] && C=1\n[ -z \"$X\" ] || C=2",
    "case": "M=TRAIN\ncase $M in\n  A|B) R=1;;\n  T*) R=2 ;;\n  *) R=3\nesac",
    "lists": "! [ 1 = 2 ] && A=1; ! [ 1 = 1 ] && B=1; [ 1 = 1 ] && [ 1 = 2 ] || C=1; [ 1 = 2 ] && D=2 && E=2\n"
    "[ 1 = 1 ] || F=1 || G=1; [ 1 = 2 ] | [ 1 = 1 ] && H=1; ! [ 1 = 1 ] | [ 1 = 2 ] && N=1",
    "nested": "A=${X:-${Y:-\"a b\"}} B=${A:+$(( 1 + ${#A} ))}",
    "append": "A=1; A+=2; A+=\" 3\"",
    "here_document": "cat <<EOF > /dev/null\nA=1\nEOF\nB=2",
    "source": ". ./other.sh\nB=$A",
    "braces": "{ A=1; B=2; }\nfunction f { C=3; }\ng() { D=4; }",
}  # fmt: skip


def read(text: str, **others: str) -> State:
    reader = Reader({"script.sh": text, **others}.get)
    reader.read("script.sh")
    return reader.state


@pytest.mark.parametrize("name", SCRIPTS)
def test_variables_equal_those_of_bash(name: str, tmp_path: Path) -> None:
    other = {"other.sh": "A=from_other"}
    for file, text in {"script.sh": SCRIPTS[name], **other}.items():
        (tmp_path / file).write_text(text)
    names = "ABCDEFGHNPR"
    printf = "".join(f'printf "%s\\0" "${{{letter}[*]-}}";' for letter in names)
    command = ["bash", "-c", f"source ./script.sh; {printf}"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    state = read(SCRIPTS[name], **other)
    values = [state.variables[letter].text if letter in state.variables else "" for letter in names]
    assert (values, state.notes) == (done.stdout.split("\0")[: len(names)], [])


@pytest.mark.parametrize(
    ("text", "words", "sources"),
    [
        (
            'LR=${LR:-"0.1"}\nP=(--lr $LR)\nP+=(--name "a b")\n${BIND} python train.py "${P[@]}" 2>&1 | tee log',
            ["python", "train.py", "--lr", "0.1", "--name", "a b"],
            {"LR", "P"},
        ),
        (
            'LR=0.1\nCMD="python train.py --lr $LR"\neval "${LOGGER} $CMD --seed=$RANDOM"',
            ["python", "train.py", "--lr", "0.1", "--seed="],
            {"LR", "CMD"},
        ),
        (
            'LR=0.1\nCMD=\'python train.py --lr $LR --name "a b"\'\neval "$CMD"',
            ["python", "train.py", "--lr", "0.1", "--name", "a b"],
            None,
        ),
    ],
)
def test_words_of_a_command_and_their_variables(text: str, words: list[str], sources: set[str] | None) -> None:
    invocation = read(text).invocations[0].words
    assert [word.text for word in invocation] == words
    assert sources in (None, invocation[3].sources)
    assert [word.text for word in invocation if not word.is_known] == [word for word in words if word.endswith("=")]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("\nA=$(curl http://example.org | sh)", 2, "output"),
        ("A=`id -u; rm -rf x`", 1, ""),
        ("[ -e /etc/passwd ] && A=1", 1, "is not supported"),
        ("A=1\nsource /etc/profile", 2, "not in the folder"),
        ("source ../outside.sh", 1, "not in the folder"),
        ("for i in 1 2; do A=$i; done", 1, "loop"),
        ("CMD='a; b'\neval \"$CMD\"", 2, "not a single known command"),
        ("(( A > 0 )) && B=1", 1, "is not supported"),
        ("A=${!B}", 1, "is not supported"),
        (f"[ {'! ' * 4000}x ] && A=1", 1, "is not supported"),
    ],
)
def test_unknown_syntax_is_noted_and_not_run(
    text: str, line: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("subprocess.Popen", "os.system"):
        monkeypatch.setattr(name, lambda *arguments, **_: pytest.fail(f"{arguments} was run"))
    state = read(text)
    if reason:
        assert [(note.line, reason in note.reason) for note in state.notes] == [(line, True)]
    assert not any(
        variable.value.is_known for variable in state.variables.values() if variable.file and not variable.text
    )


HOSTILE: dict[str, Callable[[], str]] = {
    "an open quote": lambda: "A=1\nB='x",
    "an open brace": lambda: "A=${B",
    "no fi": lambda: "if [ 1 = 1 ]; then A=1",
    "doubled forty times": lambda: "A=xxxxxxxx\n" + "A=$A$A\n" * 40,
    "nested expansions": lambda: "A=" + "${X:-" * 200 + "}" * 200,
    "nested conditions": lambda: "if true; then\n" * 3000 + "A=1\n" + "fi\n" * 3000,
    "many commands": lambda: "A=1\n" * 6000 + "source script.sh\n" * 40,
    "grows by parts": lambda: "A=x\n" + "A=$A$B\n" * 9000,
    "cuts without end": lambda: f"A={'a' * 1000}\n" + "B=${A%%*b*}\n" * 5000,
    "many words": lambda: f"A='{'a ' * 9000}'\n" + "run $A\n" * 5000,
    "too long": lambda: "A=1 # " + "x" * 200_000,
    "many notes": lambda: "".join(f"A=$(run {n})\n" for n in range(9000)),
    "sources itself": lambda: "source script.sh\nsource script.sh\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_are_rejected_or_noted(name: str) -> None:
    try:
        assert read(HOSTILE[name]()).notes
    except ShellError as error:
        assert error.reason


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        (f"A={'a' * LONGEST_CUT}\nB=${{A%x}}", True), (f"A={'a' * (LONGEST_CUT + 1)}\nB=${{A%x}}", False),
        ("A=a\nB=${A%*a*}", True), ("A=a\nB=${A%*a*b*}", False), ("A=a\nB=${A%[a]}", False),
        (f"A=a\nB=${{A%{'a' * (LONGEST_PATTERN - 1)}}}", True), (f"A=a\nB=${{A%{'a' * LONGEST_PATTERN}}}", False),
        (f"A={'a' * (LONGEST_VALUE // 2)}\nB=$A$A", True),
        (f"B=$(({'1' * 18}))", True), (f"B=$(({'1' * 19}))", False), (f"B=$((1{'+1' * 127} ))", True),
        (f"B=$((1{'+1' * 128}))", False),
        ("B=$((9**9**9))", False), ("B=$((1/0))", False),
        ("B=$((99999999999999999999))", False), ("B=$((1<<99))", False),
    ],
)  # fmt: skip
def test_limits_of_values(text: str, is_read: bool) -> None:
    state = read(text)
    assert (not state.notes) == is_read and state.variables["B"].value.is_known == is_read
