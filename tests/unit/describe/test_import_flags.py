"""The flags of a shell script: variables, arrays, defaults, sums, comments; what has no value is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from moe_overlap.commands.import_flags import main as import_flags
from moe_overlap.commands.train import main as train
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.shell_conditions import compared, evaluated
from moe_overlap.describe.readers.shell_script import script_flags
from tests.spawn import HANGS_SECONDS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests/golden/train_moe.sh"
WORDS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 2048 "
    "--position-embedding-type rope --no-position-embedding --num-experts 8 --moe-layer-freq ([0]*1+[1]*3) "
    "--tokenizer-type Llama2Tokenizer --tokenizer-model /workspace/tokenizer.model --data-path ${3} "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 7 --eval-iters 10 --no-load-optim"
)


def test_a_script_as_users_write_them() -> None:
    flags = script_flags(SCRIPT.read_text(), {}, "train_moe.sh")
    assert " ".join(flags.arguments) == WORDS
    assert flags.unresolved == ("3",)
    logged = script_flags(SCRIPT.read_text(), {"WANDB_API_KEY": "x"}, "train_moe.sh")
    assert " ".join(logged.arguments) == f"{WORDS} --wandb-project Mixtral"


def test_values_from_outside_win() -> None:
    flags = script_flags(SCRIPT.read_text(), {"LAYERS": "12", "3": "/data/text", "GPUS_PER_NODE": "4"}, "train_moe.sh")
    assert " ".join(flags.arguments) == WORDS.replace("layers 4", "layers 12").replace("${3}", "/data/text").replace(
        "global-batch-size 8", "global-batch-size 16"
    )
    assert flags.unresolved == ()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1\nB=$A\npython pretrain_gpt.py --x ${B}2", "--x 12"),
        ("A='--x $B'\nB=3\npython p.py $A", "--x $B"),
        ("A='python p.py --x $B'\nB=3\neval $A", "--x 3"),
        ('options=" --x 1 \\\n --y 2"\nrun_cmd="torchrun p.py ${options}"\npython p.py ${options}', "--x 1 --y 2"),
        ("srun python p.py --x $(( 2 + 3*4 )) --y ${Z:-5} --z ${Z-}", "--x 14 --y 5 --z"),
        ('A+=( --x 1 )\nA+=( --y 2 )\ntorchrun p.py "${A[@]}" > log 2>&1', "--x 1 --y 2"),
        ("torchrun p.py --x $HOME/$USER_DIR", "--x ${HOME}/${USER_DIR}"),
        ('S=$D/p.py\nexec torchrun --nproc-per-node 8 "$S" --x 1 "$@"', "--x 1"),
        ("A=1 OMP_NUM_THREADS=1 python -u p.py --x 1 &> log", "--x 1"),
        (
            "python tools/preprocess_data.py --input a\ntorchrun pretrain_gpt.py --x 1\necho done.py $A",
            "--x 1",
        ),
        (
            "A=(--x 1)\nif [ $P = fp8 ]; then A+=(--fp8); elif [[ $P == bf* ]]; then A+=(--bf); fi\npython p.py ${A[@]}",
            "--x 1",
        ),
        (
            'P=bf16\nif [ "$P" = fp8 ]; then\n  A=--f\nelif [[ $P == bf* ]]\nthen A=--b\nelse A=--n\nfi\npython p.py $A',
            "--b",
        ),
        ("if [ -z ${V} ]; then\n  A=\nelse\n  A=--v\nfi\npython p.py --x 1 $A", "--x 1"),
        ("T=2; if (( T > 1 )) ; then A=--sequence-parallel; else A=--x; fi\npython p.py $A", "--sequence-parallel"),
        ("T=1\n[ $T -gt 1 ] && A=--s\n[[ -z $A ]] && B='--b 1'\npython p.py $A $B", "--b 1"),
        ("if [ ! -f p.py ]; then\n  echo missing; exit 1\nfi\npython p.py --x 1", "--x 1"),
        ('M=13B\ncase "$M" in\n 7B) L=32 ;;\n 13B|14B)\n  L=40\n  ;;\n *) L=1 ;;\nesac\npython p.py --x $L', "--x 40"),
        ("A+=(\n  \"--split '99,1,0'\"\n)\npython p.py ${A[@]}", "--split 99,1,0"),
        ("if [ $X = true ]; then A=--x; elif [ $X = false ]; then A=--y; fi\npython p.py --z 1 $A", "--z 1"),
        ("A=--x\nif [ -d /data ]; then D=1; fi\nA=--y\npython p.py $A", "--y"),
        ('srun -N 2 --container-image x bash -c "cd /w && python train.py --x 1 > log"', "--x 1"),
        ("X=3\nsrun bash -lc 'export Y=4; torchrun train.py --x $X --y $Y'", "--x 3 --y 4"),
        ("torchrun --nnodes 2 -m pretrain_gpt --x 1", "--x 1"),
        (
            "C=\"python p.py --f '([0]*1+[1]*3)' --q 'x|y' --r 'a;b' --s 'run #3'\"\neval $C",
            "--f ([0]*1+[1]*3) --q x|y --r a;b --s run #3",
        ),
        ('C="python p.py --q \'a b\'"\nsrun bash -c "$C --z 1"', "--q a b --z 1"),
        ("N=3\npython p.py --x $[N * 2 + 1] --y 1", "--x 7 --y 1"),
        ('set -euo pipefail\nset -- --a 1 "b c"\npython p.py "$@" --x 1', "--a 1 b c --x 1"),
        ('f() { set -- "$@" --y 2; python p.py "$@"; }\nf --x 1', "--x 1 --y 2"),
        ("python -m torch.distributed.run --nproc-per-node 8 pretrain.py --x 1", "--x 1"),
        ("run() {\n  local N=$1\n  torchrun train.py --n $N\n}\nrun 7", "--n 7"),
        ('run() { torchrun train.py --n $1 $2 "$@"; }\nrun 7 --y', "--n 7 --y 7 --y"),
        ('torchrun train.py "$@" --x 1', "--x 1"),
        ("cat <<EOF > note\npython other.py --z 1 'don't\nEOF\npython p.py --x 1", "--x 1"),
        ("N=2\nbash <<EOF\npython p.py --x $N\nEOF", "--x 2"),
        ("sbatch <<'EOF'\n#!/bin/bash\n#SBATCH -N 2\nM=1\npython p.py --x $M\nEOF", "--x 1"),
        ("L=1e-4,1e-5\npython p.py --lr ${L%%,*} --min-lr ${L##*,}", "--lr 1e-4 --min-lr 1e-5"),
        ("F=a/b.json\npython p.py --f ${F%.json} --g ${F#a/} --n ${#F}", "--f a/b --g b.json --n 8"),
        ("H=$(hostname)\nA=(--log /logs/$H)\nA=(--x 1)\npython p.py ${A[@]}", "--x 1"),
        ('A=(--x \'a b\' "c d")\npython p.py "${A[@]}"', "--x a b c d"),
        ("A=(1 2)\npython p.py --x $A --y ${#A[@]}", "--x 1 --y 2"),
        ("python p.py --x \\\n  # --y 2 \\\n  1 # last", "--x 1"),
        ("cd src && python p.py --x 1 | tee log &\nwait", "--x 1"),
        ("(A=2; B=3)\nA=1\n{ A=5; }\npython p.py --x $A", "--x 5"),
        ("for i in 1 2; do echo $i; done\nwhile read x; do :; done < file\npython p.py --x 1", "--x 1"),
        ("[[ $A =~ ^(a|b)$ ]] && C=1\n[[ -n $Z || 2 -gt 1 ]] && B=4\npython p.py --x $B", "--x 4"),
        ("A=7; ((A % 2 == 1 && A > 3)) && B=$((A / 2 * (1 + 1)))\npython p.py --x $B", "--x 6"),
        ("python p.py --x $'1' --y `echo` --y 2 ${Q:+--q}".replace("`echo`", "3"), "--x 1 --y 3 --y 2"),
        ("python p.py --save ~/out --x 1", "--save ${HOME}/out --x 1"),
        ("X=1\nf() { local X=9; }\nf\npython p.py --lr $X", "--lr 1"),
        ("f() { X=1; return; X=2; }\nf\npython p.py --lr $X", "--lr 1"),
        ("X=1\nif [ $X = 1 ]; then\npython train.py --lr 1; exit 0\nfi\npython train.py --lr 2", "--lr 1"),
        (": ${TP:=2}\nX=\n: ${X:=5}\npython p.py --tp $TP --lr $X", "--tp 2 --lr 5"),
        ("f() { shift; python p.py --x $1; }\nf 1 2", "--x 2"),
        ("X=1\necho | { X=2; }\npython p.py --x $X", "--x 1"),
        ("if ! torchrun train.py --x 1; then echo failed; fi", "--x 1"),
        (
            'A=ab\n[ "$A" = \'a*\' ] && B=1\n[[ $A == "a*" ]] && C=1\n[[ $A == a* ]] && D=1\npython p.py --x $B$C$D',
            "--x 1",
        ),
        ("X=1\nunset X\npython p.py --x 2 $X", "--x 2"),
        ("X=1\n. .venv/bin/activate\nsource ~/.bashrc\npython p.py --x $X", "--x 1"),
        ("X=1\nsource env.sh\nX=2\npython p.py --x $X", "--x 2"),
        ("set -euo pipefail; ulimit -n 1; trap 'kill 0' EXIT\npython p.py --x 1 2>&1 >/dev/null", "--x 1"),
    ],
)
def test_ways_of_writing(script: str, words: str) -> None:
    assert " ".join(" ".join(script_flags(script, {}, "x.sh").arguments).split()) == words


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("A=1\nif [ -d /data ]; then\n  A=2\nfi\npython p.py --x $A", "x.sh line 2: decides ${A}, and cannot be read"),
        ("case $(m) in\n 7B) L=32 ;;\n 13B) L=40 ;;\nesac\npython p.py --x $L", "x.sh line 1: decides ${L}"),
        ("A=(--x)\nfor i in 1 2; do A+=(--y $i); done\npython p.py ${A[@]}", "x.sh line 2: decides ${A}"),
        ("python pretrain_a.py --x 1\n\npython pretrain_b.py --x 2", "x.sh: starts training in lines 1 and 3"),
        ("\npython p.py --tp 1 --lr 1e-$(whoami)", "x.sh line 2: has $(whoami), which cannot be read"),
        ("A=x\nD=`date`\npython p.py --seed $D", "x.sh line 2: has $(date), which cannot be read"),
        ('srun bash -c "torchrun train.py --lr $(rate)"', "x.sh line 1: has $(rate), which cannot be read"),
        ('C="python train.py --x $(date)"\neval $C', "x.sh line 1: has $(date), which cannot be read"),
        ("X=1\n((X = 8))\npython p.py --x $X", "x.sh line 2: decides ${X}"),
        ("X=1\n((X++))\npython p.py --x $X", "x.sh line 2: decides ${X}"),
        ("X=1\nlet X=4\npython p.py --x $X", "x.sh line 2: decides ${X}"),
        ("X=1\nread -r X Y <<< '3 4'\npython p.py --x $X", "x.sh line 2: decides ${X}"),
        ("X=1\nsource env.sh\npython p.py --x $X", "x.sh line 2: reads env.sh, which may set ${X}"),
        ("python p.py --x d{1,2}", "x.sh line 1: has d{1,2}, which cannot be read"),
        (
            "A=0;C=1;D=1\n[[ $A == 1 && ( $C == 1 || $D == 1 ) ]] && X=1\npython p.py --x $X",
            "x.sh line 2: decides ${X}",
        ),
        ("A=1\npython p.py --x ${A/1/2}", "x.sh line 2: has ${A...}, which cannot be read"),
        ("A=1\n\npython p.py --x 'a", "x.sh line 3: opens a quotation that is not closed"),
        ("if true; then\npython p.py", "x.sh line 1: begins a command that lacks fi"),
        ("A=(1\n2\npython p.py", "x.sh line 1: opens the array A, which is not closed"),
        ("A=1\ncat <<EOF\npython p.py", "x.sh line 2: begins a here-document that 'EOF' does not end"),
        ("done\npython p.py", "x.sh line 1: has done without its opening keyword"),
        ("f() { f; }\nf\npython p.py", "x.sh line 1: grows without end"),
        (
            "python p.py --a 1 \\\n  --b 2\n  --c 3 \\\n  --d 4",
            "x.sh line 3: begins with --c, which is no command; end the line before with a backslash",
        ),
        ("A=( --c 3 )\npython p.py --a 1\n ${A[@]}", "x.sh line 3: begins with --c, which is no command"),
        (
            'if [ -z "$M" ]; then\n  exit 1\nfi\npython p.py --x 1',
            "x.sh line 2: ends the script before it starts a program: M has no value; give it by --set M=VALUE",
        ),
        ("X=1\nprintf -v X '%d' 3\npython p.py --x $X", "x.sh line 2: sets ${X} by printf, which cannot be read"),
        ('if [ -f a ]; then set -- --a 1; fi\npython p.py "$@" --x 1', "x.sh line 1: decides ${@}"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_line(script: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        script_flags(script, {}, "x.sh")
    assert str(caught.value).startswith(line)
    assert "line" in str(caught.value) and "\n" not in str(caught.value)


def test_a_value_from_outside_settles_what_cannot_be_followed() -> None:
    script = "case $(m) in\n 7B) L=32 ;;\nesac\npython p.py --x $L"
    assert script_flags(script, {"L": "40"}, "x.sh").arguments == ("--x", "40")


def test_a_flag_and_its_value_in_one_pair_of_quotes_are_two_words() -> None:
    flags = script_flags("A+=(\n  \"--split '99,1,0'\"\n)\npython p.py ${A[@]}", {}, "x.sh")
    assert flags.arguments == ("--split", "99,1,0")


def test_no_command() -> None:
    with pytest.raises(ConfigError, match="x.sh: holds no command that starts a Python program"):
        script_flags("A=1\necho $A\n", {}, "x.sh")


def test_a_script_is_read_as_an_argument_file() -> None:
    parsed = parse([f"@{SCRIPT}", "--data-path", "text"])
    assert (parsed.config.model.num_layers, parsed.config.training.global_batch_size) == (4, 8)
    assert parsed.config.moe.moe_layer_freq == (0, 1, 1, 1)
    assert parsed.name == "train_moe"


def test_the_tool_writes_a_file_that_parses_alike(tmp_path: Path) -> None:
    out = tmp_path / "train.args"
    command = [
        sys.executable,
        "-m",
        "tools.import_flags",
        str(SCRIPT),
        "--output",
        str(out),
        "--set",
        "LAYERS=6",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}: 18 flags\n", "unresolved: ${3}\n")
    assert (
        parse([f"@{out}", "--moe-layer-freq", "2"]).config
        == parse([f"@{SCRIPT}", "--moe-layer-freq", "2", "--num-layers", "6"]).config
    )


@pytest.mark.parametrize(("pair", "fix"), [("LAYERS", "LAYERS=VALUE"), ("=6", "NAME=VALUE"), ("", "NAME=VALUE")])
def test_a_variable_without_a_value_is_refused(pair: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_flags([str(SCRIPT), "--set", pair]) == 2
    said = capsys.readouterr()
    shown = f" {pair}" if pair else ""
    assert (said.out, said.err) == ("", f"error: --set{shown}: is no NAME=VALUE; write --set {fix}\n")


@pytest.mark.parametrize(
    "script",
    [
        'srun bash -c "torchrun train.py --lr $LR"',
        'C="torchrun train.py --lr $LR"\neval $C',
        'options="--lr ${LR}"\nrun_cmd="python -u train.py ${options}"\nsrun -l sh -c "${run_cmd}"',
        "sbatch <<EOF\npython train.py --lr $LR\nEOF",
    ],
)
def test_a_variable_from_outside_survives_an_inner_script(script: str) -> None:
    flags = script_flags(script, {}, "x.sh")
    assert (flags.arguments, flags.unresolved) == (("--lr", "${LR}"), ("LR",))
    assert script_flags(script, {"LR": "3"}, "x.sh").arguments == ("--lr", "3")


@pytest.mark.parametrize(
    ("script", "num_gpus"),
    [
        ("torchrun --nnodes=4 --nproc_per_node 8 p.py --x 1", 32),
        ("G=8\nN=2\ntorchrun --nproc-per-node $G --nnodes $N p.py --x 1", 16),
        ("#!/bin/bash\n#SBATCH --nodes=4\nsrun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 p.py --x 1", 32),
        ("torchrun --nproc-per-node gpu p.py", None),
        ("python p.py", None),
    ],
)
def test_a_script_says_its_number_of_gpus(script: str, num_gpus: int | None) -> None:
    assert script_flags(script, {}, "x.sh").num_gpus == num_gpus


def test_a_variable_without_a_value_stops_training_and_no_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train([f"@{SCRIPT}"]) == 2
    assert "error: --data-path ${3}: holds a variable of a shell script without a value" in capsys.readouterr().err
    assert train([f"@{SCRIPT}", "--dry-run"]) == 0
    assert "2 processes" in capsys.readouterr().out, "as the script starts"


def test_conditions_and_sums() -> None:
    assert [evaluated(text) for text in ("7/2", "-7/2", "-7 % 3", "2*(3+4)", "1 < 2", "0+1", "1 && 0")] == [
        *(3, -3, -1, 14, 1, 1, 0)
    ]
    assert [evaluated(text) for text in ("", "1/0", "9" * 19, "(" * 300, "2 **", "1.5", "a", "010")] == [None] * 8
    assert evaluated("1" + "/1" * 60) == 1 and compared(["!"] * 3000) is None
    assert compared(["a", "=", "a*"]) and not compared(["!", "a", "=", "a"])
    assert compared(["\01\0", "=", "a", "||", "1", "-eq", "1"]) is True
    assert compared(["\01\0", "=", "a", "&&", "1", "-eq", "1"]) is None
    assert compared(["-f", "x"]) is None and compared(["-f", "x", "-a", "-z", "y"]) is False
