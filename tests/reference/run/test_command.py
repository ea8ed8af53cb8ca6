"""What `goldenppo run` prints and draws."""

from xml.etree import ElementTree

from goldenppo.conformance.cli import main
from goldenppo.conformance.render.curves import PANELS, spark


def test_a_run_prints_table_curves_memory_and_draws_the_plot(tmp_path, capsys):
    picture = tmp_path / "curves.svg"

    code = main(["run", "--size", "tiny", "--steps", "2", "--seed", "0", "1", "--plot", str(picture)])

    out = capsys.readouterr().out
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    for word in ("learn", "true", "KL", "ent", "clip", "policy", "value", "|gA|", "|gC|"):
        assert word in out
    for stage in ("rollout", "experience", "shaping", "advantages", "gradient", "optimizer", "controller"):
        assert f"\n{stage} " in out
    assert "True reward over the seeds" in out and "seed 1" in out
    lines = ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * len(PANELS)


def test_a_recording_made_and_verified_in_one_command(tmp_path, capsys):
    target = tmp_path / "recording"

    assert main(["run", "--size", "tiny", "--steps", "1", "--record", str(target), "--verify"]) == 0
    assert "Every stage agrees." in capsys.readouterr().out and (target / "manifest.json").is_file()


def test_spark_shows_the_shape():
    assert spark([0.0, 1.0, 2.0]) == "▁▅█" and spark([1.0, 1.0]) == "▁▁"
    assert len(spark(list(range(500)))) == 40
