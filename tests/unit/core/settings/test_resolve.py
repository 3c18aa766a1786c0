"""Settings: precedence of their sources, and errors that name setting, source and remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.core.settings.every_name import EVERY_NAME
from kvferry.core.settings.parsers import boolean, seconds, size_bytes, whole
from kvferry.core.settings.picker import PICKER
from kvferry.core.settings.processes import BENCH, CLIENT, DOCTOR, GATEWAY, UP, WORKER
from kvferry.core.settings.resolve import check_variables, resolve
from kvferry.core.settings.setting import Setting

PORT = Setting("port", 8000, "A port.", parse=whole(0, 65535))
NAMES = Setting("names", (), "Names.", is_repeated=True)
KIND = Setting("kind", "a", "A kind.", choices=("a", "b"))
KEY = Setting("key", "", "A key.", parse=whole(0, 9), is_secret=True)  # type: ignore[arg-type]


def value(
    setting: Setting,
    *,
    flags: dict[str, object] | None = None,
    env: dict[str, str] | None = None,
    file: dict[str, object] | None = None,
) -> tuple[object, str]:
    found = resolve([setting], flags or {}, env or {}, file or {}, "kvferry.toml")[setting.name]
    return found.value, found.source


def test_flag_before_environment_before_file_before_default() -> None:
    flags, env, file = {"port": "1"}, {"KVFERRY_PORT": "2"}, {"port": 3}
    assert value(PORT, flags=flags, env=env, file=file) == (1, "--port")
    assert value(PORT, flags={"port": None}, env=env, file=file) == (2, "KVFERRY_PORT")
    assert value(PORT, file=file) == (3, "kvferry.toml")
    assert value(PORT) == (8000, "default")


def test_repeated_settings_take_lists_and_commas() -> None:
    assert value(NAMES, flags={"names": ("x", "y")}) == (["x", "y"], "--names")
    assert value(NAMES, flags={"names": ()}, env={"KVFERRY_NAMES": "x,y"}) == (["x", "y"], "KVFERRY_NAMES")
    assert value(NAMES, file={"names": ["x"]}) == (["x"], "kvferry.toml")


@pytest.mark.parametrize(
    ("setting", "env", "says"),
    [
        (PORT, {"KVFERRY_PORT": "many"}, "KVFERRY_PORT: 'many' is invalid"),
        (PORT, {"KVFERRY_PORT": "70000"}, "must be between 0 and 65535"),
        (KIND, {"KVFERRY_KIND": "c"}, "'c' is not one of a, b"),
    ],
)
def test_a_bad_value_is_never_replaced_by_the_default(setting: Setting, env: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        value(setting, env=env)
    assert says in caught.value.message
    assert caught.value.field == setting.name


def test_a_secret_is_not_shown_in_an_error() -> None:
    with pytest.raises(UsageError) as caught:
        value(KEY, env={"KVFERRY_KEY": "hunter2"})
    assert "hunter2" not in caught.value.message
    assert caught.value.__cause__ is None


def test_a_file_with_an_unknown_setting_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown setting 'prot'; did you mean port\?"):
        resolve([PORT], {}, {}, {"prot": 1}, "kvferry.toml")
    with pytest.raises(UsageError, match="unknown setting 'zzz'; known settings are port"):
        resolve([PORT], {}, {}, {"zzz": 1}, "kvferry.toml")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("2KiB", 2048),
        ("1.5 GiB", 3 << 29),
        ("3mb", 3_000_000),
        ("8k", 8192),
        ("512Mi", 1 << 29),
        ("1tb", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1MiB", "2 parsecs", "GiB", "nan", "inf"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        size_bytes(text)


@pytest.mark.parametrize("text", ["nan", "-1", "11", "x"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"seconds|convert"):
        seconds(0, 10)(text)


def test_booleans() -> None:
    assert [boolean(t) for t in ("Yes", "on", "0", "FALSE")] == [True, True, False, False]
    with pytest.raises(ValueError, match="true or false"):
        boolean("maybe")


@given(st.integers())
def test_whole_numbers_keep_their_bounds(number: int) -> None:
    if 0 <= number <= 9:
        assert whole(0, 9)(str(number)) == number
    else:
        with pytest.raises(ValueError, match="between 0 and 9"):
            whole(0, 9)(str(number))


def test_a_setting_of_another_command_that_is_nearly_one_of_this_is_reported() -> None:
    given = {"KVFERRY_API_KEY_FILE": "keys"}
    assert check_variables(given, UP, EVERY_NAME) == {"KVFERRY_API_KEY_FILE": "KVFERRY_API_KEYS_FILE"}
    assert check_variables({**given, "KVFERRY_API_KEYS_FILE": "keys"}, UP, EVERY_NAME) == {}


def test_a_transposition_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean KVFERRY_MODEL"):
        check_variables({"KVFERRY_MODLE": "x"}, UP, EVERY_NAME)


@pytest.mark.parametrize("variable", ["KVFERRY_KVMEMORY", "KVFERRY_KV_MEMROY", "KVFERRY_KV_MEM_ORY"])
def test_a_misspelled_variable_is_refused(variable: str) -> None:
    with pytest.raises(UsageError, match=f"{variable} is not a setting; did you mean KVFERRY_KV_MEMORY"):
        check_variables({variable: "1GiB", "PATH": "/bin"}, [Setting("kv_memory", 1, "Memory.")], set())


@pytest.mark.parametrize(
    "variable", ["KVFERRY_KV_MEMORY", "KVFERRY_OTHER", "KVFERRY_SERVICE_HOST", "KVFERRY_PORT_80_TCP", "KV_MEMORY"]
)
def test_settings_of_other_commands_and_other_variables_are_ignored(variable: str) -> None:
    check_variables({variable: "x"}, [Setting("kv_memory", 1, "Memory."), Setting("threads", 1, "N.")], {"other"})


def test_every_command_ignores_the_variables_of_the_others_and_of_a_service() -> None:
    service = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP_ADDR", "GATEWAY_PORT")
    every = {f"KVFERRY_{name.upper()}": "x" for name in (*EVERY_NAME, *service, "PARENT_PID", "LOG_NAME", "PROBE_KEY")}
    for table in (WORKER, GATEWAY, UP, PICKER, BENCH, DOCTOR, CLIENT):
        check_variables(every, table, EVERY_NAME)
