"""What servers are and count, as they say it."""

import asyncio

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.engines.client import Engine, identify_engine, read_metrics
from draftsmith.train.endpoint.answers import Meta
from draftsmith.train.endpoint.client import Client

VLLM = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_drafts_total{engine="1"} 5
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 20
vllm:spec_decode_num_draft_tokens_total{engine="1"} 10
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 3
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 3
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0"} 31
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_running{engine="1"} 1
"""
PER_POS = """
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total 3
"""
SGLANG = """
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{model_name="m"} 40
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 99
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 4
"""


def test_the_engines_behind_one_page_are_summed():
    read = read_metrics(VLLM, "here")
    assert read.counters == ServerCounts(15, 30, 12, (9, 3))
    assert (read.generated_tokens, read.requests) == (31, 3)


def test_the_times_when_counters_were_made_are_no_counts():
    created = 'vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09\n'
    assert read_metrics(VLLM + created, "here").counters == ServerCounts(15, 30, 12, (9, 3))


def test_sglang_counts_steps_alone():
    read = read_metrics(SGLANG, "here")
    assert read.counters == ServerCounts(40, 0, 0, ()) and (read.generated_tokens, read.requests) == (99, 4)


@pytest.mark.parametrize(
    "page",
    [
        "no metric {",
        "vllm:num_requests_running NaN\n",
        "# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total +Inf\n",
        PER_POS,
        PER_POS.replace("_total", '_total{position="first"}'),
        PER_POS.replace("_total", '_total{position="300000000"}'),
        "vllm:num_requests_running 0.5\n",
        "sglang:generation_tokens_total -1\n",
        "sglang:generation_tokens_total 1e300\n",
    ],
    ids=["no page", "nan", "no end", "no position", "no place", "far", "a part", "negative", "huge"],
)
def test_what_is_no_metric_is_refused(page):
    with pytest.raises(InputError, match=r"here: .*expected .*, found") as error:
        read_metrics(page, "here")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("drafted, accepted, histogram", [
    ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"),
    ("spec_draft_token_num", "spec_accept_token_num", "spec_accept_histogram"),
])  # fmt: skip
def test_an_answer_of_sglang_is_counted(drafted, accepted, histogram):
    meta = {"completion_tokens": 5, "spec_verify_ct": 10, drafted: 20, accepted: 7, histogram: [5, 3, 2]}
    assert Meta(**meta).counts() == ServerCounts(10, 20, 7, (5, 2))
    assert Meta(**meta | {histogram: None}).counts() == ServerCounts(10, 20, 7, ())
    assert Meta(completion_tokens=5).counts() is None


@pytest.mark.parametrize(
    ("pages", "engine"),
    [
        ({"/version": '{"version": "0.32.0"}'}, Engine("vllm", "0.32.0")),
        ({"/props": '{"build_info": "b11434-0"}', "/version": '{"version": "1"}'}, Engine("llama.cpp", "b11434-0")),
        ({"/version": '"1.2"', "/server_info": "[1, 2]"}, Engine("other", "1.2")),
        ({"/version": '{"version": {"major": 1}}'}, Engine("other")),
        ({"/version": "<html>", "/server_info": "{}"}, Engine("other")),
        ({"/get_server_info": '{"internal_states": [], "version": "0.4"}'}, Engine("sglang", "0.4")),
        ({"/server_info": '{"internal_states": [], "speculative_num_draft_tokens": 0}'}, Engine("sglang")),
    ],
)
def test_any_server_is_recognised_by_its_pages(pages, engine):
    class Paged(Client):
        async def get_text(self, path):
            if path not in pages:
                raise InputError("404")
            return pages[path]

    async def ask() -> Engine:
        async with Paged("http://127.0.0.1:9") as client:
            return await identify_engine(client)

    assert asyncio.run(ask()) == engine
