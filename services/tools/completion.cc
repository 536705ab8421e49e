#include "ballast/services/tools/completion.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace ballast::services {
namespace {

// How a value is completed.
struct Values {
  bool taken = false;  // false: a flag, without a value
  bool paths = false;
  std::vector<std::string> words;
};

struct Option {
  std::string name;  // "--json"; empty: the command's argument
  std::string meaning;
  Values values;
};

struct Command {
  std::string name;  // empty: the program itself
  std::string meaning;
  std::vector<Option> options;
};

Values ValuesOf(const CLI::Option& option) {
  Values values;
  values.taken = option.get_expected_min() != 0;
  const std::string type = option.get_type_name();
  values.paths = absl::StrContains(type, "FILE") || absl::StrContains(type, "DIR");
  const size_t begin = type.find('{'), end = type.find('}');
  if (begin != type.npos && end != type.npos)
    values.words = absl::StrSplit(type.substr(begin + 1, end - begin - 1), ',');
  return values;
}

Command Walk(const CLI::App& app, const std::string& name) {
  Command command{name, app.get_description(), {}};
  for (const CLI::Option* option : app.get_options({})) {
    if (option->get_positional()) command.options.push_back({"", option->get_description(), ValuesOf(*option)});
    for (const std::string& long_name : option->get_lnames()) {
      command.options.push_back({"--" + long_name, option->get_description(), ValuesOf(*option)});
    }
  }
  return command;
}

// The program first, then its subcommands.
std::vector<Command> CommandsOf(const CLI::App& app) {
  std::vector<Command> commands = {Walk(app, "")};
  for (const CLI::App* sub : app.get_subcommands(nullptr)) commands.push_back(Walk(*sub, sub->get_name()));
  return commands;
}

std::vector<std::string> NamesOf(const std::vector<Command>& commands) {
  std::vector<std::string> names;
  for (const Command& command : commands) {
    if (!command.name.empty()) names.push_back(command.name);
  }
  return names;
}

// In single quotes of a POSIX shell; of fish, where a backslash escapes within them.
std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}
std::string QuotedForFish(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"'", "\\'"}}), "'");
}

// Behind an option with a value: its values, or paths, or nothing.
std::string BashValues(const Option& option) {
  if (option.values.paths) return "COMPREPLY=($(compgen -f -- \"$word\")) && ";
  if (option.values.words.empty()) return "";
  return absl::StrCat("COMPREPLY=($(compgen -W '", absl::StrJoin(option.values.words, " "), "' -- \"$word\")) && ");
}

constexpr char kBashStart[] = R"(() {
  local word="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD - 1]}" command='' words='' i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${COMP_WORDS[i]}" in
)";

std::string Bash(const std::string& program, const std::vector<Command>& commands) {
  std::string values, words;
  for (const Command& command : commands) {
    std::vector<std::string> offered = command.name.empty() ? NamesOf(commands) : std::vector<std::string>();
    for (const Option& option : command.options) {
      if (option.name.empty()) {
        offered.insert(offered.end(), option.values.words.begin(), option.values.words.end());
        continue;
      }
      offered.push_back(option.name);
      if (!option.values.taken) continue;
      absl::StrAppend(&values, "    '", command.name, " ", option.name, "') ", BashValues(option), "return ;;\n");
    }
    absl::StrAppend(&words, "    '", command.name, "') words='", absl::StrJoin(offered, " "), "' ;;\n");
  }
  return absl::StrCat(
      "_", program, kBashStart, "      ", absl::StrJoin(NamesOf(commands), " | "),
      ") command=\"${COMP_WORDS[i]}\" && break ;;\n    esac\n  done\n  case \"$command $previous\" in\n", values,
      "  esac\n  case \"$command\" in\n", words,
      "  esac\n  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\ncomplete -F _", program, " ", program, "\n");
}

// An argument of zsh's _arguments: '--option[meaning]:value:action'.
std::string ForArguments(const Option& option) {
  const std::string action = option.values.paths ? "_files"
                             : option.values.words.empty()
                                 ? " "
                                 : absl::StrCat("(", absl::StrJoin(option.values.words, " "), ")");
  const std::string meaning =
      absl::StrReplaceAll(option.meaning, {{"\\", "\\\\"}, {"[", "\\["}, {"]", "\\]"}, {":", "\\:"}});
  if (option.name.empty()) return Quoted(absl::StrCat("1:", meaning, ":", action));
  return Quoted(
      absl::StrCat(option.name, "[", meaning, "]", option.values.taken ? absl::StrCat(":value:", action) : ""));
}

std::string Zsh(const std::string& program, const std::vector<Command>& commands) {
  std::string names, cases, own;
  for (const Command& command : commands) {
    std::string arguments;
    for (const Option& option : command.options) absl::StrAppend(&arguments, " \\\n        ", ForArguments(option));
    if (command.name.empty()) {
      own = arguments;
      continue;
    }
    absl::StrAppend(&names, "\n    ",
                    Quoted(absl::StrCat(command.name, ":", absl::StrReplaceAll(command.meaning, {{":", "\\:"}}))));
    absl::StrAppend(&cases, "      ", command.name, ") _arguments", arguments, " ;;\n");
  }
  return absl::StrCat("#compdef ", program, "\n_", program, "() {\n  local context state state_descr line\n",
                      "  typeset -A opt_args\n  local -a commands=(", names, "\n  )\n", "  _arguments -C", own,
                      " \\\n        '1:command:->command' '*::argument:->argument'\n", "  case $state in\n",
                      "  command) _describe command commands ;;\n", "  argument)\n    case $line[1] in\n", cases,
                      "    esac ;;\n  esac\n}\n",
                      // Read from a file of $fpath the function is called by its name; sourced, it is registered.
                      "if [[ $funcstack[1] == _", program, " ]]; then _", program, " \"$@\"; else compdef _", program,
                      " ", program, "; fi\n");
}

std::string Fish(const std::string& program, const std::vector<Command>& commands) {
  const std::string line = absl::StrCat("complete -c ", program);
  std::string out;
  for (const Command& command : commands) {
    const std::string when =
        command.name.empty() ? "__fish_use_subcommand" : absl::StrCat("__fish_seen_subcommand_from ", command.name);
    const std::string start = absl::StrCat(line, " -n '", when, "'");
    absl::StrAppend(&out, start, " -f\n");  // no paths but where an option takes one
    if (!command.name.empty()) {
      absl::StrAppend(&out, line, " -f -n __fish_use_subcommand -a ", command.name, " -d ",
                      QuotedForFish(command.meaning), "\n");
    }
    for (const Option& option : command.options) {
      absl::StrAppend(&out, start);
      if (!option.name.empty()) absl::StrAppend(&out, " -l ", option.name.substr(2));
      if (!option.name.empty() && option.values.taken) absl::StrAppend(&out, option.values.paths ? " -r -F" : " -x");
      if (!option.values.words.empty()) absl::StrAppend(&out, " -a '", absl::StrJoin(option.values.words, " "), "'");
      absl::StrAppend(&out, " -d ", QuotedForFish(option.meaning), "\n");
    }
  }
  return out;
}

}  // namespace

std::string CompletionScript(const CLI::App& app, const std::string& shell) {
  const std::vector<Command> commands = CommandsOf(app);
  if (shell == "bash") return Bash(app.get_name(), commands);
  return shell == "zsh" ? Zsh(app.get_name(), commands) : Fish(app.get_name(), commands);
}

}  // namespace ballast::services
