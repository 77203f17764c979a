import pytest

from regard.errors import ConfigurationError
from regard.steps.installed_mechanisms import MECHANISMS, choose_mechanism, has_hangul


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_takes_its_own_sentence(name):
    assert choose_mechanism(MECHANISMS[name].sentence, name) is MECHANISMS[name]


def test_the_script_chooses_where_no_score_is_named():
    assert choose_mechanism("나는 Tom이다") is MECHANISMS["dot"]
    assert choose_mechanism("I am tired.") is MECHANISMS["scaled_dot"]
    assert has_hangul("ㅎ")
    assert not has_hangul("学生 é")


def test_a_translator_is_not_given_a_script_that_it_does_not_read():
    with pytest.raises(ConfigurationError) as english:
        choose_mechanism("I am tired.", "additive")
    assert str(english.value) == (
        "the sentence 'I am tired.' has no Korean letters, and the translator with the score 'additive' reads Korean: "
        "write it in Korean, such as '나는 학생이다', or take the score 'scaled_dot' or 'multi_head', which reads "
        "English"
    )
    with pytest.raises(ConfigurationError, match="has Korean letters, and .* 'multi_head' reads English: write it in"):
        choose_mechanism("나는 학생이다", "multi_head")
    with pytest.raises(ConfigurationError, match="score is 'dott'; the translators that regard comes with have 'addi"):
        choose_mechanism("나", "dott")
    assert choose_mechanism("1, 2", "dot").reads == "Korean"  # no letters of any script
