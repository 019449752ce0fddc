"""Every public function says what it does and what it takes.

What it takes stands in its ``Args:``. What many take alike is said once: in a section ``Methods take:`` of their class,
or ``Functions take:`` of their module or of the package that it lies in. A method says nothing that the one which it
overrides has said. What stands in for a function of torch's takes that one's arguments, and begins with its name; the
arguments of a Triton program are pointers, sizes and strides.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("accounting", "clipping", "dpbench", "experiments")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TORCHS_OWN = ("torch.", "Tensor.", "a @ W")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def public(node: ast.Module | ast.ClassDef, inside: tuple[str, ...] = ()) -> Iterator[tuple[ast.FunctionDef, tuple]]:
    """The public functions of a module, and the names of the classes that each lies in."""
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public(child, (*inside, child.name))
        elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            yield child, inside


def described(text: str | None, heading: str) -> set[str]:
    """The names that a section of a docstring describes, several to a line among them."""
    _, found, after = f"\n{inspect.cleandoc(text or '')}".partition(f"\n{heading}\n")
    section = re.split(r"\n(?=\S)", after)[0] if found else ""
    lines = [line for line in section.splitlines() if re.match(r" {4}\S", line)]
    return {name.strip(" *`") for line in lines for name in line.partition(":")[0].split(",")}


def overrides(path: Path, classes: tuple[str, ...], name: str) -> bool:
    """Whether a base of the innermost class has a method of this name."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    found = module
    for each in classes:
        found = getattr(found, each)
    return any(name in vars(base) for base in found.__mro__[1:])


def said_once(path: Path, classes: tuple[str, ...]) -> set[str]:
    """Arguments that the class, the module or a package around it describes."""
    tree = parsed(path)
    found = described(ast.get_docstring(tree), "Functions take:")
    for folder in path.parents:
        if (folder / "__init__.py").exists():
            around = parsed(folder / "__init__.py")
            found |= described(ast.get_docstring(around), "Functions take:")
    node: ast.Module | ast.ClassDef = tree
    for each in classes:
        node = next(child for child in node.body if isinstance(child, ast.ClassDef) and child.name == each)
        found |= described(ast.get_docstring(node), "Methods take:")
    return found


def faults(path: Path) -> list[str]:
    """Public functions of a module that lack a docstring, or whose docstring leaves out an argument."""
    found = []
    where = path.relative_to(ROOT)
    for function, classes in public(parsed(path)):
        decorators = [ast.unparse(each) for each in function.decorator_list]
        if any(each.endswith(".setter") or "triton.jit" in each for each in decorators):
            continue
        text, given = ast.get_docstring(function), function.args
        names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
        if text is not None and (text.startswith(TORCHS_OWN) or names <= described(text, "Args:")):
            continue
        if classes and overrides(path, classes, function.name):
            continue
        if text is None and path.parent.name != "experiments":
            found.append(f"{where}:{function.lineno}: {function.name} has no docstring")
        if missing := names - described(text, "Args:") - said_once(path, classes):
            found.append(f"{where}:{function.lineno}: {function.name} does not describe {', '.join(sorted(missing))}")
    return found


def test_public_functions_say_what_they_do_and_take():
    assert [fault for path in MODULES for fault in faults(path)] == []
