import trio

import frameshard
from frameshard.models import resolve


async def main() -> None:
    # "auto" instead of "emulated" takes the best GPU.
    async with frameshard.launch(resolve("smollm2-135m"), device="emulated", vram_budget_mb=200) as sidecar:
        async with sidecar.ask("Any rooms left?", system="You are Mira, a friendly innkeeper.") as answer:
            async for event in answer:
                print(event.text, end="", flush=True)
                if len(answer.text) == len(event.text):  # at the first token
                    await sidecar.set_budget(120)  # the game takes 80 MiB back; done on return
            print()


try:
    trio.run(main)
except frameshard.FrameshardError as error:  # says what to do
    raise SystemExit(f"{error.name}: {error}") from None
except KeyboardInterrupt:
    raise SystemExit(130) from None
