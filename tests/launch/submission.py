"""Requests for jobs that start in a fraction of a second, for the tests of submission."""

import sys
from pathlib import Path

from hpctrain.config.schema import RunConfig
from hpctrain.launch.slurm.profile import Profile, Site, site
from hpctrain.launch.submit.sbatch import Options
from hpctrain.launch.submit.send import Request


def run_config(folder: Path, name: str = "run", nodes: int = 1, ranks: int = 1, **parallel: int) -> RunConfig:
    cluster = {"nodes": nodes, "gpus_per_node": ranks}
    data = {"corpus": str(folder / "corpus.h5")}
    tree = {"name": name, "folder": str(folder), "cluster": cluster, "data": data, "parallel": parallel}
    return RunConfig.model_validate(tree)


def request(folder: Path, function, *args, nodes=1, ranks=1, chain=1, **options) -> Request:
    """One run whose ranks call `function(*args)`. `profile` changes that of the lab, `name` the run's; `texts` those
    of files."""
    changes, name, texts = options.pop("profile", {}), options.pop("name", "run"), options.pop("texts", {})
    base = site("lab")
    profile = Profile.model_validate({**base.profile.model_dump(), **changes})
    config = run_config(folder, name, nodes, ranks, **options.pop("parallel", {}))
    return Request(
        configs=(config,),
        entries=((function, tuple(args)),),
        home=config.run_folder,
        site=Site(name="lab", profile=profile, **texts),
        options=Options(**options),
        chain=chain,
    )


def main() -> None:
    """Submit one job whose rank reports into the folder that is named, and print the job's id."""
    from hpctrain.launch.submit.send import submit
    from tests.launch import jobs

    folder = Path(sys.argv[1])
    options = {"hold": True} if "--hold" in sys.argv else {}
    made = submit(request(folder, jobs.report, str(folder / "out"), profile={"sbatch": options}), print)
    print(made[0].ids[0])


if __name__ == "__main__":
    main()
