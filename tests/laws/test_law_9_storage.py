"""Law 9: what any topology saved, any other loads, bit for bit, and nothing that was saved is lost."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.laws.storage_machine import Programs
from tests.storage.campaign.errors import end_helpers


@pytest.fixture(autouse=True)
def no_helper_stays():
    yield
    end_helpers()


def test_programs_that_save_die_and_load_agree_with_a_model():
    phases = [Phase.explicit, Phase.reuse, Phase.generate]  # twelve steps are short, and threads never run alike
    run_state_machine_as_test(
        Programs, settings=settings(stateful_step_count=12, suppress_health_check=[HealthCheck.too_slow], phases=phases)
    )
