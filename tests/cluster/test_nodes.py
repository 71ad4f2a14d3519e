import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.nodes import expand, fold
from configs import UserError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[008-011]", ["gpu008", "gpu009", "gpu010", "gpu011"]),
        ("alpha,beta[01,03],gamma", ["alpha", "beta01", "beta03", "gamma"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack[0-1]b[01-02]", ["rack0b01", "rack0b02", "rack1b01", "rack1b02"]),
    ],
)
def test_b49_node_lists(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login-1.site.org", ["login-1.site.org"]),
        ("n[1-2]-ib,x", ["n1-ib", "n2-ib", "x"]),
        ("n[08-10,100]", ["n08", "n09", "n10", "n100"]),
        ("n[0]", ["n0"]),
        ("n[00-01]", ["n00", "n01"]),
    ],
)
def test_other_forms_of_slurm(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "", ",", "a,", "a,,b", "n[1-2", "n1]", "n[]", "n[1-]", "n[-2]", "n[2-1]", "n[1:3]", "n[a-b]",
        "n[[1-2]]", "n[010-11]", "n[1-02]", "n 1", "n[1 -2]", "n*", "a,a", "n[1,1]", "n[1-3],n2",
        "n[0-9999999999]", "$(id)", "n[١-٢]",
    ],
)  # fmt: skip
def test_b49_an_unknown_form_is_an_error(text):
    with pytest.raises(UserError, match="node list"):
        expand(text)


name = st.from_regex(r"[a-z][a-z0-9.-]{0,3}[0-9]{0,4}", fullmatch=True)


@given(st.lists(name, min_size=1, max_size=30, unique=True))
def test_fold_and_expand_are_inverse(names):
    assert expand(fold(names)) == names


@given(st.text(alphabet="ab01,-[]", max_size=12))
def test_what_expand_takes_survives_the_round_trip(text):
    try:
        names = expand(text)
    except UserError:
        return
    assert names
    assert expand(fold(names)) == names


def test_fold_is_as_short_as_slurms_own():
    assert fold(["gpu008", "gpu009", "gpu010", "login"]) == "gpu[008-010],login"
    assert fold(["n9", "n10", "n11"]) == "n[9,10-11]"
