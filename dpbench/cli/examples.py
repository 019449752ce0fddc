"""Common questions and examples of every command, for help texts. A test parses each of them."""

#: question -> the command line for it, without "dpbench"
QUESTIONS = (
    ("Which clipping should I take for this model, on this machine?", "recommend resnet18 --batch-size 32"),
    ("The same for a model of my own, built by a function in a file?", "recommend my/model.py:build --memory 24GiB"),
    ("How do I use a model that does not read images?", "template mine.py"),
    ("Is a backend exact on a model? Is my own?", "check --model vgg11 --backend bk_mixed --backend my/clip.py:Mine"),
    ("Why does a layer take this route, and what would another cost?", "explain timm:vit_tiny_patch16_224"),
    ("How much more does private training cost than ordinary training?", "run overhead --only model=cnn,resnet18"),
    ("How large a batch fits into 16 GiB, with each backend?", "run stress_test"),
    ("What is left of a run, and how long will it take?", "plan stress_test"),
    ("Has my change made anything slower?", "compare before/ after/ --fail-on slower:5%"),
    (
        "What ε does my training run have?",
        "epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 10000 --delta 1e-5",
    ),
    ("How much noise for ε = 3?", "calibrate --target-epsilon 3 --sample-rate 0.01 --steps 10000 --delta 1e-5"),
)

_POINT = "--sample-rate 0.01 --steps 10000 --delta 1e-5"

#: command -> (arguments, their meaning)
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "list": (("", "every name that the other commands take"), ("--format json", "for scripts")),
    "plan": (
        ("overhead", "what ./results has, what remains, and how long it will take"),
        ("stress_test --only backend=ghost,bk_mixed", "of these backends only"),
    ),
    "run": (
        ("memory_speed --smoke", "a quick test that everything works here"),
        ("overhead --only model=cnn,vgg11 --rounds 5", "a part of it; the same command continues after a kill"),
        ("stress_test --retry error,timeout", "run trials with these outcomes again"),
        ("overhead --minutes 9", "as much as fits in nine minutes; the same command continues"),
        ("my/experiment.py --output out", "your own: EXPERIMENT = Experiment(...) in a file, records in ./out"),
    ),
    "check": (
        ("--model cnn --model timm:resnet18", "every backend on two models"),
        ("--backend my/clip.py:Mine", "the conformance cases for a backend of your own"),
    ),
    "explain": (
        ("resnet18", "every use of every parameter, from shapes only"),
        ("torchvision:vgg11 --batch-size 16 --measure", "with every route timed on this machine"),
        ("my/model.py:build --image-size 64 --format json", "your own model, for scripts"),
    ),
    "recommend": (
        ("resnet18 --batch-size 32", "a built-in model"),
        ("timm:vit_tiny_patch16_224 --memory 24GiB", "one of timm's, and your card's memory"),
        ("mine.py:build --format json", "your own, in a file from `dpbench template mine.py`"),
        ('"transformers:gpt2?n_layer=6@256" --seconds 60', "six layers, 256 tokens, in a minute"),
    ),
    "template": (("mine.py", "a function that returns a model, a few records and a loss, for you to change"),),
    "compare": (
        ("results/overhead elsewhere/overhead", "two folders of records, cell by cell"),
        ("before/ after/ --fail-on slower:5% --fail-on larger:10%", "exit code 1 if anything is that much worse"),
    ),
    "report": (
        ("overhead", "figures and tables beside the records in ./results/overhead"),
        ("out/my_own --output figures", "of any folder of records"),
        ("--readme", "the numbers of README.md and results/README.md, from the records in ./results"),
    ),
    "history": (("overhead", "a figure and table for each device, of all versions in ./results/overhead"),),
    "scorecard": (("", "from all of ./results, into results/scorecard.html"),),
    "epsilon": (
        (f"{_POINT} --noise-multiplier 1.1", "by every accountant, with the kind of its result (bound, estimate)"),
        (f"{_POINT} --noise-multiplier 1.1 --accountant pld --format json", "by one of them, for scripts"),
        (f"{_POINT} --noise-multiplier 1.1 --risk --output risk.png", "its meaning for an attack, with a figure"),
        ("phases.toml", "for phases of different noise, rate or sampling, a [[phase]] each"),
    ),
    "calibrate": (
        (f"{_POINT} --target-epsilon 3", "the least noise for ε = 3, by every accountant"),
        (f"{_POINT} --target-epsilon 3 --accountant prv", "by one of them"),
        (
            f"{_POINT} --target-tpr 0.05 --accountant prv",
            "an attack finds at most 5 % of the members, with 1 % false positives",
        ),
    ),
}
