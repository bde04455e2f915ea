import os

from router.access.watched import Watched


def test_each_kind_of_change_is_seen_once(tmp_path):
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("one")
    link.symlink_to(path)
    watched = Watched([path, link])
    assert not watched.changed()
    path.write_text("three")
    assert watched.changed()
    assert not watched.changed()
    (tmp_path / "b").write_text("three")
    os.utime(tmp_path / "b", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    (tmp_path / "b").replace(path)  # same size, same time
    assert watched.changed()
    path.unlink()
    assert watched.changed()
    assert not watched.changed()


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text("same")
    (tmp_path / "data").symlink_to("one")
    watched = Watched([tmp_path / "data" / "key"])
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(tmp_path / "data")
    assert watched.changed()
