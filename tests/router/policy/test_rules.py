"""What the settings say of choosing."""

import pytest

from router.policy.rules import PolicyRules
from router.settings import RouterSettings
from schemas.settings import SettingsError, load


def settings(tmp_path, text, *flags):
    file = tmp_path / "warmwatch.toml"
    file.write_text(f"[route]\n{text}")
    return load(RouterSettings, ["--config", str(file), *flags])


def test_hardware_differs_only_in_what_is_named(tmp_path):
    made = settings(tmp_path, "prefill_b = 3e-9\n[route.hardware.h100]\nprefill_a = 4e-5\ndecode_c0 = 0.01\n")
    h100, other = (made.coefficient_book().in_use("p", hardware).rates for hardware in ("h100", "l4"))
    assert (h100.a, h100.b, h100.c0) == (4e-5, 3e-9, 0.01)
    assert other == made.rates() == made.coefficients().rates
    assert (other.a, other.b) == (1e-4, 3e-9)


def test_rules_come_from_the_settings(tmp_path):
    text = "drain_min_hit = 0.3\ncold_tokens_per_s = 9\ncold_s = 5\nengine_load_fresh_s = 2\n"
    made = settings(tmp_path, text, "--shadow-policies", "random,max_prefix")
    assert made.policy_rules() == PolicyRules(0.3, 9.0, 5.0, 2.0, ("random", "max_prefix"))
    assert settings(tmp_path, "").policy_rules() == PolicyRules()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('policy = "best"', "`policy`: must be one of cost, round_robin"),
        ('shadow_policies = ["best"]', "`shadow_policies`: must be of cost"),
        ('shadow_policies = ["cost", "cost"]', "names a policy twice"),
        ("hardware.h100.prefil_a = 1", "`hardware.h100.prefil_a`: unknown"),
        ("hardware.h100.prefill_a = 0", "`hardware.h100.prefill_a`: Input should be greater than 0"),
        ("drain_min_hit = 2", "`drain_min_hit`"),
    ],
)
def test_what_is_wrong_is_told_with_its_key(tmp_path, text, says):
    with pytest.raises(SettingsError, match="setting") as e:
        settings(tmp_path, text)
    assert says in str(e.value)
