"""Publishing to an inference engine that has a copy of the model."""

from ludic.distributed import ClientPublisher
from tests.unit.inference.local.tiny_models import ask, copy_of, greedy, make_engine, new_model, some_prompt, tokens


async def test_client_samples_from_the_published_weights_and_reports_their_version():
    served, trained, prompt = new_model("llama-mha-tied"), new_model("llama-mha-tied", seed=9), some_prompt(13)
    async with make_engine(served) as engine:
        before = await ask(engine, prompt, max_tokens=6)
        ClientPublisher(engine).publish(dict(trained.named_parameters()), version=7)
        after = await ask(engine, prompt, max_tokens=6)
    assert tokens(after) == greedy(copy_of(trained), prompt, 6) != tokens(before)
    assert before.version_runs == ((0, 6),) and after.version_runs == ((7, 6),)
