"""Settings from outside: what a DataLoader is made with changes, and the batches that it gives do not."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from launcher_observer import setting_overrides
from launcher_observer.setups import loader_values
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch):
    for owner, name in ((DataLoader, "__init__"), (_MultiProcessingDataLoaderIter, "_reset")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def set_from_outside(**settings: object) -> None:
    setting_overrides.apply(torch, {setting_overrides.VARIABLE: json.dumps(settings)})


def epochs(loader: DataLoader, count: int = 3) -> list[list[int]]:
    """The samples of some epochs, with numbers that training draws between them."""
    torch.manual_seed(7)
    found = []
    for _ in range(count):
        found.append([int(index) for batch in loader for index in batch])
        torch.rand(3)
    return found


def test_a_loader_gets_what_is_set_and_keeps_the_rest():
    set_from_outside(num_workers=2, prefetch_factor=3, persistent_workers=True)
    loader = DataLoader(Numbers(), 4, True, num_workers=1, drop_last=True)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert (loader.batch_size, loader.drop_last, loader.pin_memory) == (4, True, False)


@pytest.mark.parametrize("settings", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_the_order_of_every_epoch_stays_the_same(settings):
    before = epochs(DataLoader(Numbers(), batch_size=4, shuffle=True))
    set_from_outside(**settings)
    assert epochs(DataLoader(Numbers(), batch_size=4, shuffle=True)) == before


class ByValue(DataLoader):
    """Has no hash, and refuses attributes that it does not know."""

    def __eq__(self, other):
        return self.batch_size == other.batch_size

    def __setattr__(self, name, value):
        assert not name.startswith("_launcher")
        super().__setattr__(name, value)


def test_so_it_does_for_a_loader_without_a_hash_and_for_a_copy_of_it():
    made = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    before = epochs(ByValue(Numbers(), **made))
    set_from_outside(persistent_workers=True)
    loader = ByValue(Numbers(), **made)
    assert epochs(copy.deepcopy(loader)) == epochs(loader) == before


@pytest.mark.parametrize(
    ("dataset", "init", "stay"),
    [(Numbers(), None, False), (Numbers(), print, True), (Stream(), None, True)],
    ids=["settable", "worker_init_fn", "iterable"],
)
def test_a_record_says_which_loaders_keep_their_number_of_workers(dataset, init, stay):
    made = DataLoader(dataset, num_workers=1, worker_init_fn=init)
    assert loader_values(torch, made)["workers_stay"] == stay
    set_from_outside(num_workers=2)
    assert (DataLoader(dataset, num_workers=1, worker_init_fn=init).num_workers == 1) == stay


def test_without_workers_nothing_is_left_of_what_only_workers_have():
    set_from_outside(num_workers=0, persistent_workers=True)
    loader = DataLoader(Numbers(), num_workers=2, prefetch_factor=4, timeout=9, multiprocessing_context="fork")
    assert (loader.num_workers, loader.persistent_workers, loader.timeout) == (0, False, 0)
    assert len(list(loader)) == 12


@pytest.mark.parametrize("settings", [{"persistent_workers": True}, {"persistent_workers": False}, {"num_workers": 0}])
def test_workers_that_persist_in_the_script_stay_and_so_does_the_order(settings):
    made = {"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True}
    before = epochs(DataLoader(Numbers(), **made))
    set_from_outside(**settings)
    loader = DataLoader(Numbers(), **made)
    assert (loader.num_workers, loader.persistent_workers) == (1, True)
    assert epochs(loader) == before


def test_a_loader_whose_samples_depend_on_the_workers_keeps_their_number(capsys):
    set_from_outside(num_workers=2, pin_memory=False)
    assert DataLoader(Stream(), num_workers=1).num_workers == 1
    assert "its dataset is iterable" in capsys.readouterr().err
    assert DataLoader(Numbers(), num_workers=1, worker_init_fn=print).num_workers == 1
    assert "its worker_init_fn" in capsys.readouterr().err


def test_torchs_own_switches_are_set_and_the_unknown_is_named(capsys):
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        set_from_outside(matmul_precision="high", cudnn_benchmark=True, batch_size=3)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == ("high", True)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark
    assert "LAUNCHER_SETTINGS cannot set batch_size, only num_workers" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "3", "[1]"])
def test_without_an_object_nothing_is_set(text, capsys):
    setting_overrides.apply(torch, {setting_overrides.VARIABLE: text})
    assert DataLoader(Numbers()).num_workers == 0
    assert bool(text) == ("is not a JSON object" in capsys.readouterr().err)


def test_a_wrong_call_of_a_loader_fails_as_it_did():
    set_from_outside(num_workers=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bath_size'"):
        DataLoader(Numbers(), bath_size=4)
