"""The source `photos`."""

from __future__ import annotations

from PIL import Image

from launcher.prepare import photos, prepare


def test_photos_are_prepared_as_real_jpegs_of_two_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(photos, "EACH", 8)
    assert "12 training and 4 validation images in 2 classes; 16 written" in prepare("photos", tmp_path / "photos")
    files = sorted((tmp_path / "photos/train").rglob("*.jpg"))
    assert [file.parent.name for file in files] == ["china"] * 6 + ["flower"] * 6
    for file in files:
        with Image.open(file) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (400, 300))
        assert 30_000 < file.stat().st_size < 200_000, "as large as photographs of that size are"
    assert "0 written, 16 already there" in prepare("photos", tmp_path / "photos")


def test_a_photo_is_the_same_each_time_and_no_two_are_alike():
    first = photos.draw("china", 3).tobytes()
    assert photos.draw("china", 3).tobytes() == first
    assert len({photos.draw(label, index).tobytes() for label in photos.CLASSES for index in range(20)}) == 40
