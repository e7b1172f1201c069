"""Pages of other origins: nothing is said to browsers unless an origin is named."""

from tests.integration.gateway_pool import gateway

PAGE, STRANGER = "https://page.example", "https://stranger.example"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}


async def test_it_is_off_unless_configured() -> None:
    async with gateway() as setting:
        async with setting.client.session.get("/health", headers={"Origin": PAGE}) as response:
            assert not [name for name in response.headers if name.startswith("Access-Control")]
        preflight = setting.client.session.options("/v1/completions", headers={"Origin": PAGE, **ASKS})
        async with preflight as response:
            assert response.status == 405
            assert not [name for name in response.headers if name.startswith("Access-Control")]


async def test_a_named_origin_may_ask_and_read_and_others_may_not() -> None:
    async with gateway(cors_origins=f"{PAGE}, https://other.example", api_key="sk-0123456789") as setting:
        session = setting.client.session
        async with session.options("/v1/completions", headers={"Origin": PAGE, **ASKS}) as response:
            assert response.status == 204, "the question that comes before carries no key"
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == ASKS["Access-Control-Request-Headers"]
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert "Access-Control-Allow-Credentials" not in response.headers
        async with session.post("/v1/completions", headers={"Origin": PAGE}) as response:
            assert response.status == 401, "a named page needs a key like anybody"
            assert response.headers["Access-Control-Allow-Origin"] == PAGE, "or the page could not read why"
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
            assert response.headers["Vary"] == "Origin"
        async with session.options("/v1/completions", headers={"Origin": STRANGER, **ASKS}) as response:
            assert response.status == 401
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_star_is_every_origin() -> None:
    async with gateway(cors_origins="*") as setting:
        async with setting.client.session.get("/health", headers={"Origin": STRANGER}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "*"
        async with setting.client.session.get("/health") as response:
            assert "Access-Control-Allow-Origin" not in response.headers
