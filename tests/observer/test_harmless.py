"""What the observer looks at of a script's own things runs none of their code, breaks none of it, and writes down no secret."""

from __future__ import annotations

import sys
import threading
from collections import UserDict
from pathlib import Path

import numpy
import pytest
import torch
from launcher_observer import addresses
from launcher_observer.lines import LineSampler
from launcher_observer.secret_shapes import shows_a_secret
from launcher_observer.setups import samples_of

from launcher.insight.script import Address
from tests.conftest import wait_until
from tests.observer.test_observer import line_number, ran


class Proxy:
    """Answers whatever it is asked for with an error that no one expects."""

    def __getattr__(self, name):
        raise KeyError(name)


BATCHES = {
    "a tensor": (torch.zeros(4, 8), 4),
    "a number": (torch.zeros(()), 0),
    "an array": (numpy.zeros((4, 8)), 4),
    "images and labels": ([torch.zeros(4, 3, 8, 8), torch.zeros(4)], 4),
    "images of several sizes": ([torch.zeros(3, 8, 8)] * 5, 5),
    "a dictionary": ({"id": ["a", "b", "c"], "image": torch.zeros(3, 8)}, 3),
    "a tokenizer's": (UserDict(ids=torch.zeros(4, 8)), 4),
    "texts": (["a", "b"], 2),
    "an iterator": (zip([torch.zeros(4, 8)]), 0),
    "a proxy": (Proxy(), 0),
    "proxies": ([Proxy()] * 4, 4),
    "nothing": (None, 0),
}
"""What it is -> the batch, and how many samples are seen in it."""


@pytest.mark.parametrize("kind", BATCHES)
def test_samples_are_counted_without_a_call_of_the_users_code(kind):
    batch, samples = BATCHES[kind]
    assert samples_of(batch, 5) == samples
    assert not isinstance(batch, zip) or len([*batch]) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_has_no_shape_has_no_known_samples():
    assert samples_of(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), 2) == 0


def test_an_instruction_of_no_line_counts_as_its_functions_first_line():
    """A sample can find the training thread at one, such as those that make cells for closures. Then `f_lineno` is None."""

    def waiting():
        over.wait(30)

    over = threading.Event()
    waiting.__code__ = waiting.__code__.replace(co_linetable=b"")
    thread = threading.Thread(target=waiting)
    thread.start()
    sampler = LineSampler(lambda: None, over.is_set, lambda function, *given: function(*given))
    sampler.start(thread.ident)
    try:
        wait_until(lambda: sampler.lines()["samples"], what="a sample")
        [seen] = sampler.lines()["lines"]
    finally:
        over.set()
        thread.join()
    assert Path(__file__).name in seen["file"] and seen["line"] == waiting.__code__.co_firstlineno


def test_a_removed_working_folder_ends_no_record(monkeypatch, tmp_path):
    """A file outside of the script's folder has its absolute name then."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    outside, beside = str(tmp_path / "train.py"), str(tmp_path / "script" / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", beside, raising=False)
    assert [addresses.shown(file) for file in (outside, beside)] == [outside, "train.py"]


def test_a_secret_in_a_line_of_code_enters_no_file(tmp_path):
    """The token's line makes the loader, and takes nearly all of the time."""
    done = ran(
        tmp_path,
        f"""
class Remote(Slow):
    def __init__(self, token):
        self.token = token
    def __getitem__(self, index):
        return time.sleep(0.03) or super().__getitem__(index) if self.token == "{"hf_" + "abcdefghij" * 3 + "abcd"}" else None

loader = DataLoader(Remote(token="{"hf_" + "abcdefghij" * 3 + "abcd"}"), batch_size=2)
epoch(); epoch()
""",
    )
    assert done.code == 0, done.stderr
    [loader] = done.timeline().setup("loader")
    assert (loader["text"], loader["line"]) == ("", line_number(tmp_path, "loader = DataLoader(Remote("))
    [*lines] = done.timeline().of("lines")[-1]["lines"]
    assert (lines[0]["text"], lines[0]["line"]) == ("", line_number(tmp_path, "return time.sleep("))
    files = [file for file in done.folder.rglob("*") if file.is_file()]
    assert files and not [file for file in files if b"hf_abc" in file.read_bytes()]


@pytest.mark.parametrize(
    "line",
    [
        'DataLoader(Remote(token="hunter2"))',
        "DataLoader(Remote(token=('hf_'",
        'os.environ["API_KEY"] = f"{prefix}2"',
        'os.environ.setdefault("DB_PASSWORD", "hunter2")',
        "log_in({'password': 'hunter2'})",
        'api_key: str = """hunter2',
        'if self.token != "hunter2":',
        f"log_in('{'ghp_' + 'a1B2' * 9}')",
        'get(f"https://example.com/{index}?api_key=9f8a7c6b5d4e3f2a")',
        'get("https://example.com/?access_token=Zk3x&id=3")',
        'connect("Server=h;User=u;Password=Hunter2Qx9Lm;")',
        "connect('host=db password=Hunter2Qx9Lm user=me')",
    ],
)
def test_a_line_with_a_secret_is_known_by_its_shape(line):
    assert shows_a_secret(line)


@pytest.mark.parametrize(
    "line",
    [
        'api_key = os.environ["API_KEY"]',
        'password = getpass("Password: ")',
        'token = os.environ.get("HF_TOKEN", "")',
        'tokens = tokenizer(texts, pad_token="<pad>", padding="max_length")',
        'for key in ("loss", "accuracy"):',
        "loss = criterion(model(inputs), targets)",
        'get(f"https://example.com/{index}?api_key={key}")',
        "log_in(token=token)",
    ],
)
def test_a_line_without_one_keeps_its_text(line):
    assert not shows_a_secret(line)


def test_what_torch_compile_meets_first_after_copies_are_hooked_is_compiled(tmp_path):
    """On a GPU they are hooked after the first step. Tensors of subclasses have their methods looked up, unlike plain ones."""
    done = ran(
        tmp_path,
        """
from launcher_observer import torch_hooks
from torchvision import tv_tensors

class Own(torch.Tensor):
    pass

def cast(inputs):
    return inputs.to(torch.float64) + 1

def unbound(inputs, to=torch.Tensor.to):
    return to(inputs, torch.float64) + 1

epoch()
torch_hooks._copies(torch_hooks.current(), torch)
assert torch.Tensor.to.__wrapped__ is not torch.Tensor.to
for inputs in (torch.randn(3), nn.Parameter(torch.randn(3)), torch.randn(3).as_subclass(Own), tv_tensors.Image(torch.zeros(3, 4, 4))):
    for function in (cast, unbound, lambda inputs, to=torch.Tensor.to: to(inputs, torch.float64) + 1):
        torch._dynamo.reset()
        compiled, plain = torch.compile(function, backend="eager")(inputs), function(inputs)
        assert type(compiled) is type(plain) and torch.equal(compiled, plain), (function, inputs)
torch._dynamo.reset()
torch.compile(unbound, backend="eager", fullgraph=True)(torch.randn(3))
""",
    )
    assert (done.code, done.stderr) == (0, "")


def test_a_tensors_subclass_and_a_mode_are_given_the_methods_that_they_know(tmp_path):
    """torchvision keeps the type of an image by its list of torch.Tensor's methods, and lazy parameters refuse what is none of theirs."""
    done = ran(
        tmp_path,
        """
from launcher_observer import torch_hooks
from torch.overrides import TorchFunctionMode
from torchvision import tv_tensors

known, seen = torch.Tensor.to, []

class Sees(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(function)
        return function(*args, **(kwargs or {}))

epoch()
torch_hooks._copies(torch_hooks.current(), torch)
assert torch.Tensor.to is not known
image, boxes = tv_tensors.Image(torch.zeros(3, 4, 4)), tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(4, 4))
for each in (image, boxes):
    for moved in (each.to(torch.float64), each.to("cpu"), each.to(torch.zeros(1, dtype=torch.float64))):
        assert type(moved) is type(each), type(moved)
assert type(torch.zeros(1).to(image)) is torch.Tensor
lazy = nn.LazyLinear(3).to("cpu").to(torch.float64)
assert lazy(torch.zeros(1, 2, dtype=torch.float64)).shape == (1, 3)
with Sees():
    torch.zeros(1).to(torch.float64)
assert known in seen and torch.Tensor.to not in seen
""",
    )
    assert (done.code, done.stderr) == (0, "")


def test_copies_of_a_script_that_compiles_are_left_alone_and_the_record_says_so(tmp_path):
    done = ran(
        tmp_path,
        """
from launcher_observer import torch_hooks
torch.compile(model)
epoch()
torch_hooks._copies(torch_hooks.current(), torch)
assert "to" not in vars(torch.Tensor)
""",
    )
    assert (done.code, done.stderr) == (0, "")
    [line] = done.timeline().of("not_measured")
    assert line["what"] == "host_to_device" and "torch.compile" in line["why"]


@pytest.mark.parametrize(
    ("file", "users", "of"),
    [
        ("/home/me/train.py", True, None),
        ("/tmp/torchinductor_me/ab/cabc.py", False, "torch"),
        ("/home/me/.triton/cache/k.py", False, "torch"),
        ("/kept/ab/cabc.py", False, "torch"),
        ("/v/lib/python3.11/site-packages/timm/data.py", False, "timm"),
    ],
)
def test_what_torch_compile_writes_is_not_the_users(monkeypatch, file, users, of):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept")
    assert (addresses.is_users.__wrapped__(file), addresses.package.__wrapped__(file)) == (users, of)
    known = Address(file, 1, "")
    assert known.is_own == (users or file.startswith("/kept")), "where only the record is known, by usual names"
