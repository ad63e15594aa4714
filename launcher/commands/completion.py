"""`launcher completion`: a script that completes commands, options, built-in configs and runs in bash or zsh.

Everything but the runs and files is written into the script, so that no completion starts Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from launcher import backends
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.main import command_line
from launcher.commands.parser import commands_of, every_command
from launcher.config import builtin_configs

BASH = """\
# Completion of launcher in bash. In ~/.bashrc: eval "$(launcher completion bash)"
_launcher() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command= options= takes= word run
    local -a runs=()
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $word in
            --) return ;;  # another program's words follow
            -*) ;;
            *) [[ -z $command || $command == @({parents}) ]] && command="${{command:+$command }}$word" ;;
        esac
    done
    case $command in
{cases}
        *) return ;;
    esac
    if [[ $before == --on ]]; then
        options={backends} takes=
    elif [[ $current != -* ]]; then
        case $takes in
            config) options={configs}; compopt -o filenames ;;
            run) options=; for run in "${{LAUNCHER_RUNS:-runs}}"/*/plan.json; do
                run=${{run%/plan.json}}; [[ -e $run/plan.json ]] && runs+=("${{run##*/}}"); done ;;
            words) ;;
            *) options= ;;
        esac
    fi
    COMPREPLY=()
    for run in "${{runs[@]}}"; do  # not by compgen -W, which would run $(…) in the name of a folder
        printf -v word %q "$run"
        [[ $run == "$current"* || $word == "$current"* ]] && COMPREPLY+=("$word")
    done
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(
        compgen -W "$options" -- "$current"
        [[ $takes == config && $current != -* ]] && {{ compgen -d -- "$current"; compgen -f -X '!*.y*ml' -- "$current"; }}
    )
}}
complete -o default -F _launcher launcher
"""

ZSH = """\
#compdef launcher
# Completion of launcher in zsh. In ~/.zshrc, below compinit: eval "$(launcher completion zsh)"
_launcher() {{
    local command= takes= word
    local -a options runs
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case $word in
            --) _normal; return ;;  # another program's words follow
            -*) ;;
            *) [[ -z $command || $command == ({parents}) ]] && command="${{command:+$command }}$word" ;;
        esac
    done
    case $command in
{cases}
        *) _files; return ;;
    esac
    if [[ ${{words[CURRENT-1]}} == --on ]]; then
        compadd -- {backends}
    elif [[ ${{words[CURRENT]}} == -* || $takes == words ]]; then
        compadd -- $options
    elif [[ $takes == config ]]; then
        compadd -- {configs}
        _files -g '*.y(a|)ml'
    elif [[ $takes == run ]]; then
        runs=(${{LAUNCHER_RUNS:-runs}}/*/plan.json(N:h:t))
        compadd -- $runs
    else
        _files
    fi
}}
compdef _launcher launcher
"""


def add(to: arguments.Add) -> None:
    made = to("completion", "print a script that completes this command line in bash or zsh", carry_out)
    made.add_argument(
        "shell",
        choices=["bash", "zsh"],
        metavar="bash|zsh",
        help='for example in ~/.bashrc: eval "$(launcher completion bash)"',
    )


def carry_out(options: argparse.Namespace) -> int:
    print(script(options.shell, command_line()), end="")
    return DONE


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The completion script for the commands of a parser."""
    bash = shell == "bash"
    commands = every_command(parser)
    parents = sorted({name.rpartition(" ")[0] for name in commands if " " in name})
    cases = []
    for name, takes, words in _cases(parser, parents):
        listed = shlex.quote(" ".join(words)) if bash else f"({' '.join(words)})"
        cases.append(f"        {shlex.quote(name)}) options={listed} takes={takes} ;;")
    known = builtin_configs.names(), list(backends.BACKENDS)
    configs, places = (shlex.quote(" ".join(one)) if bash else " ".join(one) for one in known)
    return (BASH if bash else ZSH).format(
        cases="\n".join(cases), parents="|".join(parents), configs=configs, backends=places
    )


def _cases(parser: argparse.ArgumentParser, parents: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(command, kind of its arguments, words) for the command line itself, commands with subcommands, and all others."""
    yield "", "words", [*commands_of(parser), "--version", "--help"]
    for name in parents:
        yield name, "words", [*commands_of(commands_of(parser)[name]), "--help"]
    for name, one in every_command(parser).items():
        arguments_ = {str(action.metavar) for action in one._actions if not action.option_strings}
        takes = "run" if "RUN" in arguments_ else "config" if arguments_ & {"CONFIG", "CONFIG|SCRIPT"} else "files"
        yield name, takes, [option for action in one._actions for option in action.option_strings if option[:2] == "--"]
