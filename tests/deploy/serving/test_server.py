"""The server as clients know it: tritonclient, many at once, and what comes from those that mean no good."""

import asyncio
import contextlib
import json
import logging
import random
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("aiohttp")

import aiohttp

from deploy.inference.runtime import load
from deploy.serving.endpoints import FixedModel
from deploy.serving.server import HEADER_LENGTH, HEALTH, Server
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.slots import Slots
from fedge.errors import TransportError
from fedge.wire.port import MAX_CONNECTIONS, SILENT_S, _Phase
from fedge.wire.streams import open_connection

from ..bundles import GOLDEN, digest, other_gate, source, variant
from ..served import binary, body, golden, served
from ..tcp import connections

pytestmark = pytest.mark.torch_free

EXPECTED = golden()
X = EXPECTED["x"]
INFER = "/v2/models/digits/infer"


@contextlib.asynccontextmanager
async def serving(model=None, batching=None, **limits):
    """A server in this loop, and a client session for it."""
    async with (
        served(model, **(batching or {})) as one,
        served(name="other") as two,
        Server([one, two], port=0, **limits) as server,
        aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(30)) as session,
    ):
        yield server, session


async def ask(session, data=None, path=INFER, method="POST", **headers):
    """Status and content of a response, which is JSON whatever was asked."""
    async with session.request(method, path, data=data, headers=headers) as response:
        return response.status, json.loads(await response.read() or b"null")


async def still_answers(session):
    status, content = await ask(session, body(X))
    assert status == 200
    assert content["outputs"][1]["data"] == EXPECTED["y"].tolist()


# ------------------------------------------------------------------------------------------------- who may ask


async def test_with_a_token_who_has_none_learns_of_health_alone():
    async with serving(token="0123456789abcdef") as (_, session):
        for path in HEALTH:
            assert (await ask(session, path=path, method="GET"))[0] == 200
        for shown in (
            "",
            "0123456789abcdef",
            "Bearer 0123456789abcdeF",
            "Bearer 0123456789abcdef0",
            "Basic x",
            "Bearer ü",
            "Bearer \udcff\udcfe",  # bytes that are no UTF-8
        ):
            for path, method in (
                *((INFER, "POST"), ("/v2/repository/index", "POST")),
                *((path, "GET") for path in ("/v2", "/v2/models/digits/ready", "/metrics", "/v2/models/stats", "/x")),
            ):
                async with session.request(method, path, headers={"Authorization": shown}) as response:
                    assert response.status == 401
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert "Authorization: Bearer TOKEN" in (await response.json())["error"]
        status, content = await ask(session, body(X), Authorization="Bearer 0123456789abcdef")
        assert status == 200
        assert content["outputs"][1]["data"] == EXPECTED["y"].tolist()


async def test_over_tls_it_answers_who_trusts_it_and_outlives_who_does_not_speak_it(caplog):
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    here, there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(here)
    authority.configure_trust(there)
    async with serving(tls=here) as (server, _):
        assert server.url.startswith("https://127.0.0.1:")
        host, port = server.url.removeprefix("https://").split(":")
        async with open_connection(host, int(port)) as (reader, writer):
            writer.write(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"live" not in await reader.read()
        async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(ssl=there)) as session:
            await still_answers(session)
            assert await ask(session, path="/v2/health/ready", method="GET") == (200, {"ready": True})
        async with aiohttp.ClientSession(server.url) as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await ask(stranger, path="/v2", method="GET")


# ------------------------------------------------------------------------------------------------- tritonclient


@pytest.fixture
def url():
    """A server in a thread with a loop of its own: tritonclient blocks."""
    started, stop = threading.Event(), asyncio.Event()
    found = []

    async def run():
        async with serving() as (server, _):
            found.extend([server.url, asyncio.get_running_loop()])
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    assert started.wait(30)
    yield found[0].removeprefix("http://")
    found[1].call_soon_threadsafe(stop.set)
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def triton():
    return pytest.importorskip("tritonclient.http")


def test_tritonclient_finds_out_what_is_there(url, triton):
    with triton.InferenceServerClient(url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("digits")
        assert client.is_model_ready("digits", "3")
        assert not client.is_model_ready("digits", "4")
        assert not client.is_model_ready("nobody")
        assert client.get_server_metadata()["name"] == "fedge"
        described = client.get_model_metadata("digits")
        assert described["versions"] == ["3"]
        assert [output["name"] for output in described["outputs"]][:2] == ["probabilities", "class"]
        assert client.get_model_config("digits", "3")["max_batch_size"] == 256
        index = client.get_model_repository_index()
        assert index == [{"name": n, "version": "3", "state": "READY", "reason": ""} for n in ("digits", "other")]
        for change in (client.load_model, client.unload_model):
            with pytest.raises(Exception, match="as long as the server runs"):
                change("digits")


def test_tritonclient_reads_the_statistics(url, triton):
    tensor = triton.InferInput("x", X.shape, "UINT8").set_data_from_numpy(X)
    wrong = triton.InferInput("x", [1, 3], "UINT8").set_data_from_numpy(X[:1, 0, :3])
    with triton.InferenceServerClient(url) as client:
        client.infer("digits", [tensor])
        with pytest.raises(Exception, match="the task takes"):
            client.infer("digits", [wrong])
        digits, other = client.get_inference_statistics()["model_stats"]
        assert client.get_inference_statistics("digits", "3")["model_stats"] == [digits]
    assert (digits["name"], digits["inference_count"], digits["execution_count"]) == ("digits", 12, 1)
    durations = digits["inference_stats"]
    assert [durations[what]["count"] for what in ("success", "fail", "queue", "compute_infer")] == [1, 1, 1, 1]
    assert [batch["batch_size"] for batch in digits["batch_stats"]] == [12]
    assert digits["last_inference"] > 1e12
    assert (other["name"], other["inference_count"], other["inference_stats"]["success"]["count"]) == ("other", 0, 0)


def test_tritonclient_sends_bf16(url, triton):
    x = X.astype(pytest.importorskip("ml_dtypes").bfloat16)
    tensor = triton.InferInput("x", x.shape, "BF16").set_data_from_numpy(x)
    with triton.InferenceServerClient(url) as client:
        np.testing.assert_array_equal(client.infer("digits", [tensor]).as_numpy("class"), EXPECTED["y"])


async def test_prometheus_reads_what_was_counted():
    pytest.importorskip("prometheus_client")
    async with serving() as (_, session):
        await still_answers(session)
        assert (await ask(session, b"{}"))[0] == 400
        for accept in ("application/openmetrics-text", "text/plain"):
            async with session.get("/metrics", headers={"Accept": accept}) as response:
                assert (response.status, response.content_type) == (200, accept)
                lines = (await response.text()).split("\n")
    for line in (
        'fedge_serve_requests_total{model="digits",outcome="answered"} 1.0',
        'fedge_serve_requests_total{model="digits",outcome="refused"} 1.0',
        'fedge_serve_request_seconds_bucket{le="+Inf",model="digits"} 1.0',
        'fedge_serve_request_seconds_count{model="digits"} 1.0',
        'fedge_serve_samples_total{model="digits"} 12.0',
        'fedge_serve_calls_total{model="digits"} 1.0',
        'fedge_serve_release{model="digits"} 3.0',
        'fedge_serve_candidate{candidate="expert-3",model="digits"} 1.0',
        "fedge_serve_turned_away_total 0.0",
        "fedge_serve_connections 1.0",
    ):
        assert line in lines
    provider = 'provider="CPUExecutionProvider"'
    assert any(line.startswith("fedge_serve_bundle{") and provider in line for line in lines)


async def test_without_prometheus_client_metrics_say_what_to_install(not_installed):
    not_installed("prometheus_client", "deploy.serving.metrics", "fedge.wire.openmetrics")
    async with serving() as (_, session):
        status, content = await ask(session, path="/metrics", method="GET")
    assert status == 501
    assert "fedge[metrics]" in content["error"]


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary_out", [False, True])
@pytest.mark.parametrize("binary_in", [False, True])
def test_tritonclient_infers(url, triton, binary_in, binary_out, compression):
    tensor = triton.InferInput("x", X.shape, "UINT8").set_data_from_numpy(X, binary_data=binary_in)
    names = ["energies", "class_name", "probabilities", "outlier", "class", "weights"]
    wanted = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in names]
    with triton.InferenceServerClient(url) as client:
        result = client.infer(
            "digits", [tensor], model_version="3", outputs=wanted, request_id="a-7",
            request_compression_algorithm=compression,
        )  # fmt: skip
    for name in ("probabilities", "weights", "energies"):
        assert result.as_numpy(name).dtype == np.float32
        np.testing.assert_allclose(result.as_numpy(name), EXPECTED[name], atol=1e-4)
    np.testing.assert_array_equal(result.as_numpy("class"), EXPECTED["y"])
    texts = [text.decode() if isinstance(text, bytes) else text for text in result.as_numpy("class_name")]
    assert texts == [str(y) for y in EXPECTED["y"]]
    assert result.as_numpy("outlier").dtype == bool
    response = result.get_response()
    assert response["id"] == "a-7"
    assert response["parameters"]["bundle"] == digest(GOLDEN)


def test_tritonclient_without_named_outputs_gets_all_in_binary(url, triton):
    tensor = triton.InferInput("x", X.shape, "FP32").set_data_from_numpy(X.astype(np.float32))
    with triton.InferenceServerClient(url) as client:
        result = client.infer("digits", [tensor])
    outputs = result.get_response()["outputs"]
    assert len(outputs) == 6
    assert all("binary_data_size" in output["parameters"] for output in outputs)
    np.testing.assert_array_equal(result.as_numpy("class"), EXPECTED["y"])


def test_tritonclient_sends_pictures(url, triton):
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(X[0]).save(file, "PNG")
    pictures = np.array([file.getvalue()] * 2, dtype=object)
    tensor = triton.InferInput("x", [2], "BYTES").set_data_from_numpy(pictures)
    with triton.InferenceServerClient(url) as client:
        result = client.infer("digits", [tensor])
    assert result.as_numpy("class").tolist() == [EXPECTED["y"][0]] * 2


def test_tritonclient_is_told_what_was_wrong(url, triton):
    from tritonclient.utils import InferenceServerException

    tensor = triton.InferInput("x", X.shape, "UINT8").set_data_from_numpy(X)
    with triton.InferenceServerClient(url) as client:
        with pytest.raises(InferenceServerException, match=r"\[404\] .* nobody; there are digits, other"):
            client.infer("nobody", [tensor])
        with pytest.raises(InferenceServerException, match=r"\[400\] there is no output logits"):
            client.infer("digits", [tensor], outputs=[triton.InferRequestedOutput("logits")])
        with pytest.raises(InferenceServerException, match="the inputs are x, x"):
            client.infer("digits", [tensor, tensor])


def test_many_tritonclients_at_once_each_get_their_own_answer(url, triton):
    def work(seed):
        rng = random.Random(seed)
        with triton.InferenceServerClient(url) as client:
            for _ in range(30):
                i = rng.randrange(len(X))
                tensor = triton.InferInput("x", [1, 8, 8], "UINT8")
                tensor.set_data_from_numpy(X[i : i + 1], binary_data=rng.random() < 0.5)
                result = client.infer(rng.choice(["digits", "other"]), [tensor])
                assert result.as_numpy("class").tolist() == [EXPECTED["y"][i]]
                np.testing.assert_allclose(result.as_numpy("probabilities")[0], EXPECTED["probabilities"][i], atol=1e-4)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# ------------------------------------------------------------------------------------------------- bad input


async def test_what_is_not_there_is_said_as_json():
    async with serving() as (_, session):
        for method, path, status, text in (
            ("GET", "/", 404, "nothing at /"),
            ("GET", "/v2/models/", 404, "nothing at"),
            ("GET", "/v2/models/nobody", 404, "there are digits, other"),
            ("POST", "/v2/models/%00%2F/infer", 404, "no model"),
            ("GET", "/v2/models/digits/versions/1", 404, "version 3 alone"),
            ("GET", INFER, 405, "use POST"),
            ("DELETE", "/v2", 405, "use GET"),
        ):
            found, content = await ask(session, path=path, method=method)
            assert (found, text in content["error"]) == (status, True), content
        await still_answers(session)


async def test_malformed_requests_are_told_why_and_nothing_falls_over():
    good, header_bytes = binary(X)
    async with serving() as (_, session):
        for data, length in (
            (b"", None), (b"null", None), (b"[" * 10**6, None), (body(np.zeros((2, 3)), "FP64"), None),
            (good, None), (good, "-1"), (good, "1e3"), (good, "9" * 40), (good, "٣"), (good, str(len(good) + 1)),
            (good[:-1], str(header_bytes)), (body(X, "UINT7"), None),
        ):  # fmt: skip
            headers = {} if length is None else {HEADER_LENGTH: length}
            status, content = await ask(session, data, **headers)
            assert status == 400
            assert len(content["error"]) > 20
        status, content = await ask(session, b"no gzip", **{"Content-Encoding": "gzip"})
        assert status == 400
        await still_answers(session)


async def test_any_mutation_of_a_request_is_answered_with_200_or_400():
    rng = random.Random(0)
    async with serving() as (_, session):
        for _ in range(300):
            data, header_bytes = binary(X[:2]) if rng.random() < 0.5 else (body(X[:2]), None)
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(changed))
                changed[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3)) or b"9"
            headers = {} if header_bytes is None else {HEADER_LENGTH: str(header_bytes + rng.choice([0, 0, -1, 1]))}
            status, content = await ask(session, bytes(changed), **headers)
            assert status in {200, 400}, content
            assert ("error" in content) == (status == 400) if status == 400 else True
        await still_answers(session)


async def test_what_is_no_http_closes_that_connection_alone():
    async with serving() as (server, session):
        host, port = server.url.removeprefix("http://").split(":")
        rng = random.Random(1)
        for data in (
            b"\x16\x03\x01\x02\x00\x01",
            b"GET / HTTP/9.9\r\n\r\n",
            rng.randbytes(5000),
            b"POST " + b"a" * 70_000,
        ):
            async with open_connection(host, int(port)) as (reader, writer):
                writer.write(data)
                if writer.can_write_eof():
                    writer.write_eof()
                answer = await asyncio.wait_for(reader.read(), 300)
                assert answer == b"" or answer.startswith(b"HTTP/1.")
        await still_answers(session)


# ------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large(chunked):
    async def pieces():
        for _ in range(100):
            yield b" " * 1000

    async with serving(max_body_bytes=50_000) as (_, session):
        status, content = await ask(session, pieces() if chunked else b" " * 100_000)
        assert status == 413
        assert "too large" in content["error"]
        await still_answers(session)


async def test_a_compressed_body_counts_as_what_it_becomes():
    import zlib

    async with serving(max_body_bytes=50_000) as (_, session):
        status, _ = await ask(session, zlib.compress(b" " * 10**7), **{"Content-Encoding": "deflate"})
        assert status == 413
        await still_answers(session)


@pytest.fixture
def limits(monkeypatch):
    """Called with limits of the server in seconds: it waits no longer than that."""

    def shortened(**limits_s):
        for name, limit_s in limits_s.items():
            monkeypatch.setattr(
                f"{'deploy.serving.server' if name == 'BODY_TIMEOUT_S' else 'fedge.wire.port'}.{name}", limit_s
            )

    return shortened


async def test_slow_bodies_and_heads_are_cut_off(limits):
    limits(BODY_TIMEOUT_S=0.2, HEAD_TIMEOUT_S=0.2)
    async with serving() as (server, session):
        host, port = server.url.removeprefix("http://").split(":")
        async with open_connection(host, int(port)) as (reader, writer):
            writer.write(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
            answer = await asyncio.wait_for(reader.read(), 300)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b'"error":"the body took longer' in answer

        async with open_connection(host, int(port)) as (reader, writer):
            writer.write(b"POST /v2 HTTP/1.1\r\nHost:")
            assert await asyncio.wait_for(reader.read(), 300) == b""
        await still_answers(session)


async def test_a_connection_too_many_is_turned_away():
    async with serving() as (server, session):
        host, port = server.url.removeprefix("http://").split(":")
        async with connections(host, int(port), MAX_CONNECTIONS):
            await asyncio.sleep(0.05)
            async with open_connection(host, int(port)) as (reader, _):
                answer = await asyncio.wait_for(reader.read(), 300)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Retry-After: 1" in answer
        await asyncio.sleep(0.05)
        await still_answers(session)


async def until(condition):
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def holding(server, n, first=b""):
    """The writers of connections that say this and then nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    async with connections(host, int(port), n) as found:
        for _, writer in found:
            writer.write(first)
        yield [writer for _, writer in found]


SLOW = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()


async def bodies_come(server, n):
    await until(lambda: [one.phase for one in server._port.connections] == [_Phase.BODY] * n)


async def test_health_is_answered_however_many_connect_at_once():
    async with serving() as (server, session), holding(server, 300):
        await until(lambda: len(server._port.connections) == MAX_CONNECTIONS)
        for _ in range(3):
            assert await ask(session, path="/v2/health/live", method="GET") == (200, {"live": True})


async def test_300_silent_connections_hold_64_places_and_nobody_is_locked_out():
    async with serving() as (server, session), holding(server, 300):
        await until(lambda: len(server._port.connections) == MAX_CONNECTIONS)
        await until(lambda: len(server._port._runner.server.connections) == MAX_CONNECTIONS)  # who goes goes soon
        await asyncio.sleep(SILENT_S)

        assert await ask(session, path="/v2/health/ready", method="GET") == (200, {"ready": True})
        await still_answers(session)


async def test_health_is_answered_while_all_places_are_at_work():
    async with serving() as (server, session), holding(server, MAX_CONNECTIONS, SLOW):
        await bodies_come(server, MAX_CONNECTIONS)

        for path in HEALTH:
            assert await ask(session, path=path, method="GET") == (200, HEALTH[path])
        assert (await ask(session, body(X)))[0] == 503
        await bodies_come(server, MAX_CONNECTIONS)


async def test_slow_bodies_give_way_when_somebody_comes(limits):
    limits(SLOW_S=0.1)
    async with serving() as (server, session), holding(server, MAX_CONNECTIONS, SLOW):
        await bodies_come(server, MAX_CONNECTIONS)
        await asyncio.sleep(0.2)

        await still_answers(session)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_hangs_up_in_mid_body_is_one_line_in_the_log(caplog, reset):
    caplog.set_level(logging.INFO)
    async with serving() as (server, session):
        async with holding(server, 1, SLOW) as (writer,):
            await bodies_come(server, 1)
            if reset:
                writer.transport.abort()
        await until(lambda: not server._port.connections)
        await asyncio.sleep(0.05)
        assert [record.message.partition(" ")[0] for record in caplog.records] == ["event=client_gone"]
        assert not any(record.exc_info for record in caplog.records)
        await still_answers(session)


class Blocked(FixedModel):
    """A bundle that answers when it is let."""

    def __init__(self):
        super().__init__(load(GOLDEN))
        self.entered, self.open = threading.Event(), threading.Event()

    def answer(self, x):
        self.entered.set()
        assert self.open.wait(30)
        return super().answer(x)


async def test_a_full_queue_is_503_with_a_time_to_come_back_and_health_still_answers():
    model = Blocked()
    async with serving(model, batching={"max_waiting": 2}) as (_, session):
        asked = [asyncio.create_task(ask(session, body(X[:1])))]
        assert await asyncio.to_thread(model.entered.wait, 30)
        asked += [asyncio.create_task(ask(session, body(X[:1]))) for _ in range(10)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 8:
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert {task.result()[0] for task in done} == {503}
        async with session.post(INFER, data=body(X[:1])) as response:
            assert response.headers["Retry-After"] == "1"
        assert (await ask(session, path="/v2/health/live", method="GET"))[0] == 200
        model.open.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 3
        await still_answers(session)


async def test_what_was_asked_before_it_stops_is_answered():
    model = Blocked()
    async with contextlib.AsyncExitStack() as outer:
        _, session = await outer.enter_async_context(serving(model))
        asked = [asyncio.create_task(ask(session, body(X[:1]))) for _ in range(3)]
        assert await asyncio.to_thread(model.entered.wait, 30)
        asyncio.get_running_loop().call_later(0.1, model.open.set)
        await asyncio.sleep(0)
        server = _
        await server.__aexit__(None, None, None)
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3


class Failing(FixedModel):
    def answer(self, x):
        raise RuntimeError("secret path")


async def test_a_model_that_fails_is_500_without_its_insides(caplog):
    async with serving(Failing(load(GOLDEN))) as (_, session):
        status, content = await ask(session, body(X))
        assert status == 500
        assert "secret" not in content["error"]
        assert "secret path" in caplog.text
        assert (await ask(session, body(X), "/v2/models/other/infer"))[0] == 200


async def test_a_port_that_is_taken_says_so():
    async with serving() as (server, _):
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(TransportError, match="choose another port"):
            async with Server([], port=port):
                pass


async def test_updates_switch_under_load_without_a_failed_request(tmp_path):
    slots = Slots(tmp_path / "home")

    def put(release):
        folder = variant(tmp_path / str(release), release=release, gate=other_gate if release % 2 else None)
        slots.stage(*source(folder))
        slots.switch()

    put(1)
    slots.confirm()
    answering = ActiveBundle(slots, Limits(probation_predictions=5))
    stop = asyncio.Event()

    async with serving(answering) as (_, session):

        async def load_it():
            releases = []
            while not stop.is_set():
                status, content = await ask(session, body(X[:1]))
                assert status == 200
                releases.append(content["parameters"]["release"])
            return releases

        asked = [asyncio.create_task(load_it()) for _ in range(4)]
        for release in range(2, 6):
            await asyncio.to_thread(put, release)
            await asyncio.to_thread(answering.swap)
            while slots.state.trial is not None:
                await asyncio.sleep(0.01)
                await asyncio.to_thread(answering.settle)
        stop.set()
        for releases in await asyncio.gather(*asked):
            assert releases == sorted(releases)
        assert answering.runtime.manifest.release == 5
