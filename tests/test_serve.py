"""The HTTP API over real sockets, with a runner that needs no model: what it takes, answers, refuses and serves."""

from __future__ import annotations

import base64
import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from serve_stub import Running, StubRunner, call, content, ended, running, until
from twinreel.policy_options import PRESETS
from twinreel.policy_windows import pattern_skips
from twinreel.request_json import TOP
from twinreel.serve.intake import FIRST, LAST, NUMBERS, OWN, REFERENCE, TEXTS
from twinreel.serve.shapes import PICTURE
from twinreel.serve.views import PRESET_CALLS

SHORT = {"target": {"duration_seconds": 1}}


@pytest.fixture(scope="module")
def runner() -> StubRunner:
    return StubRunner()


@pytest.fixture(scope="module")
def site(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory, runner: StubRunner) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("serve") / "data", tiny_original, runner) as made:
        until(lambda: call(f"{made.url}/ready")[0] == 200)
        yield made


def post(site: Running, body: Any, **headers: str) -> tuple[int, Any]:
    status, answer, _ = call(
        f"{site.url}/v1/videos", body, "POST", {k.replace("_", "-"): v for k, v in headers.items()}
    )
    return status, answer


def refused(site: Running, body: Any, field: str | None, status: int = 422) -> str:
    """The message of a refusal that names `field`; nothing was queued."""
    before = site.service.jobs.ids()
    got, answer = post(site, body)
    assert got == status, answer
    assert answer["error"]["field"] == field, answer
    assert site.service.jobs.ids() == before
    return str(answer["error"]["message"])


def test_a_job_from_post_to_content(site: Running) -> None:
    status, made, headers = call(f"{site.url}/v1/videos", {"prompt": "A bell.", "seed": 3, **SHORT})
    assert status == 201 and headers["location"] == f"/v1/videos/{made['id']}"
    assert (made["object"], made["task"], made["seed"], made["steps"]) == ("video", "t2va", 3, 50)
    job = ended(site.url, made["id"])
    assert (job["status"], job["progress"], job["calls"]) == ("completed", 100, 49)
    status, data, headers = call(f"{site.url}/v1/videos/{made['id']}/content")
    assert (status, headers["content-type"], data) == (200, "video/mp4", content("A bell.", 3))
    assert job["files"]["video"] == len(data) and headers["x-content-type-options"] == "nosniff"
    status, report, _ = call(f"{site.url}/v1/videos/{made['id']}/content?variant=report&download=1")
    assert status == 200 and report == {"seed": 3}
    assert call(f"{site.url}/v1/videos/{made['id']}/content?variant=audio")[0] == 409
    assert call(f"{site.url}/v1/videos/{made['id']}/content?variant=nonsense")[0] == 422


def test_documented_examples_run_as_they_stand(site: Running) -> None:
    _, described, _ = call(f"{site.url}/openapi.json")
    content = described["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    taken, schema = content["application/json"]["examples"], content["application/json"]["schema"]
    assert set(taken) == {"t2va", "fl2va", "ref2va", "variants", "openai"}
    for name, example in taken.items():
        validate(example["value"], schema)
        status, made = post(site, example["value"])
        assert status == 201, (name, made)
        for job in made["variants"]:
            assert ended(site.url, job)["status"] == "completed", name


def test_documented_fields_are_those_that_are_taken(site: Running) -> None:
    """A JSON body and a form may hold what is described, each by its name; nothing else is described."""
    _, described, _ = call(f"{site.url}/openapi.json")
    post_of = described["paths"]["/v1/videos"]["post"]
    content = {kind: item["schema"]["properties"] for kind, item in post_of["requestBody"]["content"].items()}
    assert set(content["application/json"]) == {*TOP, *OWN}
    assert set(content["multipart/form-data"]) == {"request", *TEXTS, *NUMBERS, *FIRST, LAST, REFERENCE}
    assert [item["name"] for item in post_of["parameters"]] == ["Idempotency-Key"]


def test_published_requests_pass_unchanged_but_for_their_media(site: Running) -> None:
    """SPEC 11's three scripts; the lengths and the short edge of the released weights are outside this small model."""
    given = {"task": "fl2va", "prompt": "p", "seed": 0}
    given["conditions"] = [{"type": "image", "uri": PICTURE, "role": "keyframe", "frame_index": 0}]
    given["target"] = {"short_edge": 64, "aspect_ratio": "auto", "duration_seconds": 5}
    status, made = post(site, given)
    assert status == 201 and (made["task"], made["inputs"][0]["role"]) == ("fl2va", "keyframe")
    given["task"], given["conditions"][0] = "ref2va", {"type": "image", "uri": PICTURE, "role": "reference"}
    status, made = post(site, given)
    assert status == 201 and made["inputs"][0]["label"] == "Picture 1"
    status, data, headers = call(site.url + made["inputs"][0]["url"])
    assert status == 200 and headers["content-type"] == "image/png"
    assert data == base64.b64decode(PICTURE.partition(",")[2])
    status, told, _ = call(f"{site.url}/v1/videos/{made['id']}/inputs/1")
    assert status == 404 and "no input 1; it has 1" in told["error"]["message"]


def test_openai_fields(site: Running) -> None:
    body = {"model": site.service.weights.name, "prompt": "p", "seconds": "2", "size": "96x64"}
    status, made = post(site, {**body, "input_reference": PICTURE})
    assert status == 201 and (made["size"], made["task"], made["request"]["target"]["duration_seconds"]) == (
        "96x64", "fl2va", 2,
    )  # fmt: skip
    assert "multiple" in refused(site, {**body, "size": "100x64"}, "size")
    refused(site, {**body, "seconds": "99"}, "seconds")
    refused(site, {**body, "seconds": "soon"}, "seconds")
    refused(site, {**body, "target": {"duration_seconds": 2}}, "seconds")
    refused(site, {**body, "model": "sora-2"}, "model")
    refused(site, {**body, "input_reference": "data:image/png;base64,AAAA"}, "input_reference")


def test_fields_of_refusals(site: Running, runner: StubRunner) -> None:
    ran = len(runner.ran)
    good = {"prompt": "p", "conditions": [{"type": "image", "uri": PICTURE, "role": "reference"}], **SHORT}

    def condition(**changes: Any) -> dict[str, Any]:
        return {**good, "conditions": [good["conditions"][0], {**good["conditions"][0], **changes}]}

    refused(site, {}, "prompt")
    refused(site, {"prompt": " "}, "prompt")
    refused(site, {"prompt": "p", "target": {"duration_seconds": 99}}, "target.duration_seconds")
    refused(site, {"prompt": "p", "target": {"width": 33, "height": 64}}, "target.width")
    refused(site, {"prompt": "p", "target": {"width": 64, "height": 33}}, "target.height")
    refused(site, {"prompt": "p", "size": "64x33"}, "size")
    refused(site, {"prompt": "p", "flow_shift": 3, "audio_flow_shift": 0}, "audio_flow_shift")
    refused(site, {"prompt": "p", "target": {"aspect_ratio": "9:1"}}, "target.aspect_ratio")
    refused(site, {"prompt": "p", "num_inference_steps": 1}, "num_inference_steps")
    refused(site, {"prompt": "p", "guidance_scale": 7}, "guidance_scale")
    for name in ("steps", "duration", "shifts", "keyframes"):
        assert "priority" in refused(site, {"prompt": "p", name: 7}, name)  # among what may stand there
    refused(site, {"prompt": "p", "policy": "magic"}, "policy")
    assert "file of the server" in refused(site, {"prompt": "p", "policy": "adaptive:profile=/etc/passwd"}, "policy")
    for number in (0, 9, 10**30):
        assert "from 1 to 8" in refused(site, {"prompt": "p", "n": number}, "n")
    refused(site, {"prompt": "p", "n": 2, "seed": 2**63 - 1}, "seed")
    refused(site, {"prompt": "p", "priority": 1000}, "priority")
    refused(site, condition(uri="/etc/passwd"), "conditions[1].uri")
    refused(site, condition(uri="file:///etc/passwd"), "conditions[1].uri")
    refused(site, condition(uri="upload:nothing"), "conditions[1].uri")
    assert "not allowed" in refused(site, condition(uri="http://169.254.169.254/latest"), "conditions[1].uri")
    refused(site, condition(uri="s3://a/b"), "conditions[1].uri")
    refused(site, condition(type="hologram"), "conditions[1].type")
    refused(site, condition(start_time_seconds=1), "conditions[1].start_time_seconds")
    refused(site, {**good, "conditions": "none"}, "conditions")
    for text in (
        b'{"prompt": "p", "prompt": "q"}',
        b'{"prompt": NaN}',
        b"[1]",
        b"\xff",
        b'{"prompt": "\\ud800"}',
        b"[" * 9999,
        '{"prompt": "p"}'.encode("utf-16"),
        '{"prompt": "p"}'.encode("utf-32-le"),
    ):
        status, answer = post(site, text, Content_Type="application/json")
        assert status == 422, answer
    assert len(runner.ran) == ran


def test_idempotency_keys(site: Running) -> None:
    body = {"prompt": "once", "n": 2, **SHORT}
    first, second = post(site, body, Idempotency_Key="k1"), post(site, body, Idempotency_Key="k1")
    assert (first[0], second[0]) == (201, 200) and first[1]["variants"] == second[1]["variants"]
    assert post(site, {**body, "seed": 1}, Idempotency_Key="k1")[0] == 409
    assert post(site, body, Idempotency_Key="k" * 201)[0] == 422


def test_variants_have_consecutive_seeds(site: Running) -> None:
    _, made = post(site, {"prompt": "many", "n": 3, "seed": 10, **SHORT})
    jobs = [ended(site.url, job) for job in made["variants"]]
    assert [job["seed"] for job in jobs] == [10, 11, 12] and {job["group"] for job in jobs} == {made["id"]}
    assert call(f"{site.url}/v1/videos/{jobs[2]['id']}/content")[1] == content("many", 12)


def test_ranges(site: Running) -> None:
    _, made = post(site, {"prompt": "range", **SHORT})
    ended(site.url, made["id"])
    url, whole = f"{site.url}/v1/videos/{made['id']}/content", content("range", 42)
    status, data, headers = call(url, headers={"Range": "bytes=100-199"})
    assert (status, data, headers["content-range"]) == (206, whole[100:200], f"bytes 100-199/{len(whole)}")
    assert call(url, headers={"Range": "bytes=-7"})[1] == whole[-7:]
    assert call(url, headers={"Range": "bytes=19990-"})[1] == whole[19990:]
    for header in ("bytes=99999-", "x", "bytes=9-5", "items=0-1", "bytes=a"):
        status, told, bad = call(url, headers={"Range": header})
        assert (status, told["error"]["field"]) == (416 if header == "bytes=99999-" else 400, "Range"), header
        assert told["error"]["type"] == "range_error" and told["error"]["message"], header
        assert bad.get("content-range") == (f"bytes */{len(whole)}" if status == 416 else None)
    assert call(url, headers={"Range": "bytes=0-9", "If-Range": '"other"'})[0] == 200
    assert call(url, headers={"Range": "bytes=0-9", "If-Range": headers["etag"]})[0] == 206


def test_events_until_the_end(site: Running, runner: StubRunner) -> None:
    runner.gate.clear()
    _, first = post(site, {"prompt": "held", **SHORT})
    until(lambda: first["id"] in runner.ran)
    _, second = post(site, {"prompt": "behind", **SHORT})
    heard: list[tuple[str, dict[str, Any]]] = []

    def listen() -> None:
        with urllib.request.urlopen(f"{site.url}/v1/videos/{second['id']}/events", timeout=20) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer:
                if line.startswith(b"event: "):
                    name = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    heard.append((name, json.loads(line[6:])))

    thread = threading.Thread(target=listen)
    thread.start()
    until(lambda: heard)
    runner.seconds = 0.5
    runner.gate.set()
    thread.join(20)
    runner.seconds = 0.0
    names = [name for name, _ in heard]
    assert names[0] == "queued" and names[-1] == "completed" and {"step", "preview"} <= set(names)
    assert heard[0][1]["position"] == 0 and heard[0][1]["status"] == "queued"
    steps = [state["running"] for name, state in heard if name == "step"]
    previews = [state["preview"] for name, state in heard if name == "preview"]
    told = {state["running"]["done"] for name, state in heard if name in ("stage", "step")}
    assert len(set(previews)) == len(previews)
    assert {state["running"]["done"] for name, state in heard if name == "preview"} <= told  # it hides no step
    assert steps[0]["stage"] == "denoise" and steps[0]["total"] == 5 and steps[0]["eta"] == 1.0
    assert [state["progress"] for _, state in heard] == sorted(state["progress"] for _, state in heard)
    until(lambda: site.service.hub.readers() == 0)


def test_priorities_and_cancel(site: Running, runner: StubRunner) -> None:
    runner.gate.clear()
    _, running_job = post(site, {"prompt": "slow one", **SHORT})
    until(lambda: running_job["id"] in runner.ran)
    _, low = post(site, {"prompt": "low", **SHORT})
    _, high = post(site, {"prompt": "high", "priority": 9, **SHORT})
    assert high["position"] == 0
    assert call(f"{site.url}/v1/videos/{low['id']}")[1]["position"] == 1
    status, state, _ = call(f"{site.url}/v1/videos/{low['id']}/cancel", method="POST")
    assert (status, state["status"]) == (202, "cancelled")
    assert call(f"{site.url}/v1/videos/{low['id']}/cancel", method="POST")[0] == 409
    status, state, _ = call(f"{site.url}/v1/videos/{running_job['id']}", method="DELETE")
    assert (status, state["cancelling"]) == (202, True)
    runner.gate.set()
    assert ended(site.url, running_job["id"])["status"] == "cancelled"
    assert ended(site.url, high["id"])["status"] == "completed" and low["id"] not in runner.ran


def test_delete_removes(site: Running) -> None:
    _, made = post(site, {"prompt": "gone", **SHORT})
    ended(site.url, made["id"])
    status, answer, _ = call(f"{site.url}/v1/videos/{made['id']}", method="DELETE")
    assert (status, answer["deleted"]) == (200, True) and not site.service.jobs.path(made["id"]).exists()
    for path, method in (("", "GET"), ("/content", "GET"), ("/events", "GET"), ("/cancel", "POST"), ("", "DELETE")):
        status, answer, _ = call(f"{site.url}/v1/videos/{made['id']}{path}", method=method)
        assert (status, answer["error"]["type"]) == (404, "not_found")


@pytest.mark.parametrize("address", ["content", "content?variant=frames", "inputs/0"])
def test_files_that_are_gone_are_not_found(site: Running, address: str) -> None:
    """A removal may come between a row and its files, and on a full disk it leaves the row."""
    _, made = post(site, {"prompt": "p", "input_reference": PICTURE, **SHORT})
    ended(site.url, made["id"])
    shutil.rmtree(site.service.jobs.path(made["id"]))
    status, told, _ = call(f"{site.url}/v1/videos/{made['id']}/{address}")
    assert (status, told["error"]["type"]) == (404, "not_found")


def test_media_of_jobs_that_come_to_nothing_count_for_retention(site: Running, runner: StubRunner) -> None:
    item = {"type": "image", "uri": PICTURE, "role": "reference"}
    size = len(base64.b64decode(PICTURE.partition(",")[2]))
    runner.gate.clear()
    made = [post(site, {"prompt": word, "conditions": [item], **SHORT})[1]["id"] for word in ("fail", "never run")]
    until(lambda: made[0] in runner.ran)
    call(f"{site.url}/v1/videos/{made[1]}", method="DELETE")
    runner.gate.set()
    assert [ended(site.url, job)["status"] for job in made] == ["failed", "cancelled"]
    for job in made:
        assert site.service.jobs.get(job).bytes >= size  # type: ignore[union-attr]


def test_failures_say_why_and_end_nothing(site: Running) -> None:
    _, made = post(site, {"prompt": "fail", **SHORT})
    job = ended(site.url, made["id"])
    assert (
        job["status"] == "failed"
        and job["error"]["code"] == "FloatingPointError"
        and "step 3" in job["error"]["message"]
    )
    assert call(f"{site.url}/v1/videos/{made['id']}/content")[0] == 409
    assert ended(site.url, post(site, {"prompt": "next", **SHORT})[1]["id"])["status"] == "completed"


def test_lists(site: Running) -> None:
    for word in ("alpha", "beta", "gamma"):
        ended(site.url, post(site, {"prompt": f"list {word}", **SHORT})[1]["id"])
    page = call(f"{site.url}/v1/videos?limit=2&q=list")[1]
    assert [video["prompt"] for video in page["data"]] == ["list gamma", "list beta"] and page["has_more"]
    page = call(f"{site.url}/v1/videos?limit=2&q=list&after={page['last_id']}")[1]
    assert [video["prompt"] for video in page["data"]] == ["list alpha"] and not page["has_more"]
    assert call(f"{site.url}/v1/videos?status=queued")[1]["data"] == [] and page["counts"]["completed"] >= 3
    for query, field in (
        ("limit=0", "limit"), ("limit=x", "limit"), ("limit=1&limit=2", "limit"), ("after=x", "after"),
        ("status=done", "status"), ("page=2", "page"), ("order=up", "order"),
    ):  # fmt: skip
        status, told, _ = call(f"{site.url}/v1/videos?{query}")
        assert (status, told["error"]["field"]) == (422, field), query


def test_models_and_limits(site: Running) -> None:
    model = call(f"{site.url}/v1/models")[1]["data"][0]
    assert model["partitions"] == {"fl2va": ["t2va", "fl2va"], "ref2va": ["ref2va"]} and model["ready"]
    assert model["limits"]["multiple"] == 32 and model["engine"]["device"] == "none" and not model["preview"]
    assert {"every-step", "forecast:balanced", "reuse"} <= {policy["name"] for policy in model["policies"]}
    assert PRESET_CALLS == {name: 49 - len(pattern_skips(49, options)) for name, options in PRESETS.items()}


def test_the_cause_of_a_lost_engine_names_no_path(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.service.dispatcher, "cause", "ConfigError: another engine works in /srv/data/twinreel")
    status, told, _ = call(f"{site.url}/ready")
    assert (status, told["cause"]) == (503, "ConfigError: another engine works in twinreel")


def test_health_metrics_and_unknown_paths(site: Running) -> None:
    assert call(f"{site.url}/health")[1]["status"] == "ok"
    text = call(f"{site.url}/metrics")[1].decode()
    for line in (
        'twinreel_jobs{status="completed"}',
        "twinreel_engine_up 1.0",
        'twinreel_cache_lookups_total{result="hits"}',
        "twinreel_model_calls_total",
        'twinreel_refused_total{type="request_error"}',
    ):
        assert line in text
    status, answer, headers = call(f"{site.url}/v1/nothing")
    assert (status, answer["error"]["type"]) == (404, "not_found") and "access-control-allow-origin" not in headers
    status, _, headers = call(f"{site.url}/v1/videos", method="PUT")
    assert (status, headers["allow"]) == (405, "GET, HEAD, POST")
    assert call(f"{site.url}/../../etc/passwd")[0] == 404
    assert call(f"{site.url}/style.css", headers={"Range": "x"})[1]["error"]["type"] == "range_error"


def test_prompts_stay_out_of_the_log(site: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        ended(site.url, post(site, {"prompt": "my secret words", **SHORT})[1]["id"])
        post(site, {"prompt": "my secret words", "seed": -1})
    assert "queued" in caplog.text and "secret" not in caplog.text


def test_a_mistake_of_ours_has_the_shape_too(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.service.jobs, "get", lambda job: 1 / 0)
    status, answer, _ = call(f"{site.url}/v1/videos/video_x")
    assert (status, answer["error"]["type"]) == (500, "internal") and "division" not in answer["error"]["message"]


def test_full_queue(tiny_original: Path, tmp_path: Path) -> None:
    runner = StubRunner()
    runner.gate.clear()
    with running(tmp_path, tiny_original, runner, max_queued=2) as site:
        _, first = post(site, {"prompt": "a", **SHORT})
        until(lambda: first["id"] in runner.ran)
        assert [post(site, {"prompt": "b", **SHORT})[0] for _ in range(2)] == [201, 201]
        status, answer, headers = call(f"{site.url}/v1/videos", {"prompt": "c", **SHORT})
        assert (status, answer["error"]["type"]) == (429, "busy") and 1 <= int(headers["retry-after"]) <= 3600
        assert post(site, {"prompt": "d", "n": 2, **SHORT})[0] == 429
        runner.gate.set()
