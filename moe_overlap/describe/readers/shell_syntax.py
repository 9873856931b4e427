"""Parser of shell scripts: from text to a tree of commands, without values. Standard library only.

Contract: `parse_script` supports the syntax of launch scripts: all kinds of quotation, `${...}` with its operators, `$(...)`,
`$((...))`, arrays, comments, continued lines, redirections, here-documents, `&&`, `||`, pipelines, groups, `if`, `case`, loops,
functions, `[[ ]]` and `(( ))`. Anything else raises `SyntaxProblem` with the line. The time is linear in the length of the text.

One difference from a shell: a comment line within a continued command ends the command in a shell. Launch scripts comment out
flags in this way, so here the command continues after the comment.

Source: POSIX.1-2017, Shell Command Language, sections 2.2 to 2.10; the Bash manual for arrays, `[[` and `((`.
"""

from __future__ import annotations

import re
from typing import Final

from moe_overlap.describe.readers.shell_tree import (
    AndOr,
    Arithmetic,
    Assignment,
    Case,
    Condition,
    Function,
    If,
    Loop,
    Node,
    Parameter,
    Piece,
    ShellGroup,
    ShellPipeline,
    Simple,
    Substitution,
    Sum,
    Text,
    Word,
)

MOST_NESTED = 40
"""Most levels of nested commands; a launch script has about five."""


class SyntaxProblem(Exception):
    """A syntax error, or unsupported syntax.

    Args:
        line: its number, from 1.
        rule: the error.
    """

    def __init__(self, line: int, rule: str) -> None:
        self.line, self.rule = line, rule
        super().__init__(f"line {line}: {rule}")


DECLARING: Final = frozenset(("export", "declare", "local", "readonly", "typeset"))
OPERATORS: Final = (":-", ":=", ":+", ":?", "-", "=", "+", "?", "%%", "%", "##", "#")
"""Supported operators of `${NAME...}`; an operator comes before its prefixes."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,9}|[@*#?$!-]")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\n]*\])?(\+?)=")
_FUNCTION = re.compile(
    r"(?:function[ \t]+([\w:.-]+)[ \t]*(?:\([ \t]*\))?|([A-Za-z_][\w:.-]*)[ \t]*\([ \t]*\))\s*\{(?=\s)"
)
_REDIRECTION = re.compile(r"\d*(?:<<-|<<<|<<|<&|>&|&>>|&>|>>|>\||<>|<|>)")
_KEYWORD = re.compile(r"\[\[|\]\]|[a-z]+|[{}!]")
_COMMENT_LINES = re.compile(r"(?:[ \t]*#[^\n]*\n)+")
_ENDS = frozenset(" \t\n;&|()<>")
_CLOSING = frozenset(("then", "do", "done", "fi", "elif", "else", "esac", "}"))


def parse_script(text: str) -> tuple[Node, ...]:
    """Parse a script.

    Raises:
        SyntaxProblem: a quotation or bracket is not closed, or a keyword is misplaced.
    """
    parser = _Parser(text.replace("\r\n", "\n"))
    nodes = parser.commands(frozenset())
    if not parser.at_end:
        raise SyntaxProblem(parser.line, f"holds {parser.ahead} where no command can end")
    return nodes


class _Parser:
    """Parses a text from left to right; every method advances `_place` past the text that it has read."""

    def __init__(self, text: str, line: int = 1) -> None:
        self._text, self._place, self._nested = text, 0, 0
        self._counted, self._lines = 0, line
        self._after_documents: dict[int, int] = {}
        """Place of a line end -> the place after the here-documents that follow it."""

    @property
    def line(self) -> int:
        """The number of the current line. Each line end is counted once, because places only increase."""
        if self._place > self._counted:
            self._lines += self._text.count("\n", self._counted, self._place)
            self._counted = self._place
        return self._lines

    @property
    def at_end(self) -> bool:
        """Whether the text is read to its end."""
        return self._place >= len(self._text)

    @property
    def ahead(self) -> str:
        """The next few characters, for an error."""
        return repr(self._text[self._place : self._place + 10].split("\n")[0])

    # Commands

    def commands(self, stops: frozenset[str]) -> tuple[Node, ...]:
        """Commands up to one of the keywords or operators in `stops`, which the caller reads."""
        self._nested += 1
        if self._nested > MOST_NESTED:
            raise SyntaxProblem(self.line, f"is nested more than {MOST_NESTED} deep")
        nodes: list[Node] = []
        while True:
            self._separators()
            if self.at_end or self._keyword() in stops or any(self._is_next(stop) for stop in stops & {")", ";;"}):
                break
            before = self._place
            nodes.append(self._and_or())
            if self._place == before:
                raise SyntaxProblem(self.line, f"holds {self.ahead} where a command begins")
        self._nested -= 1
        return tuple(nodes)

    def _separators(self) -> None:
        """Skip separators of commands: blanks, comments, line ends, `;` and `&`."""
        while True:
            self._blanks()
            if self._is_next("\n"):
                self._line_end()
            elif self._is_next(";;") or not self._text.startswith((";", "&"), self._place):
                return
            else:
                self._place += 1

    def _and_or(self) -> Node:
        first, rest = self._pipeline(), []
        while self._is_next("&&") or self._is_next("||"):
            operator = self._text[self._place : self._place + 2]
            self._place += 2
            self._line_ends()
            rest.append((operator, self._pipeline()))
        return AndOr(first, tuple(rest)) if rest else first

    def _pipeline(self) -> Node:
        is_negated = self._keyword() == "!"
        if is_negated:
            self._take("!")
        commands = [self._command()]
        while self._is_next("|") and not self._is_next("||"):
            self._place += 2 if self._is_next("|&") else 1
            self._line_ends()
            commands.append(self._command())
        return ShellPipeline(tuple(commands), is_negated) if is_negated or len(commands) > 1 else commands[0]

    def _command(self) -> Node:
        """One command, simple or compound, with its redirections."""
        self._blanks()
        keyword = self._keyword()
        function = _FUNCTION.match(self._text, self._place)
        node: Node
        if function is not None:
            self._place = function.end()
            node = Function(function[1] or function[2], self._until("}"))
        elif keyword == "if":
            node = self._if()
        elif keyword == "case":
            node = self._case()
        elif keyword in ("for", "select", "while", "until"):
            node = self._loop(keyword)
        elif keyword == "{":
            self._take("{")
            node = ShellGroup(self._until("}"), is_subshell=False)
        elif keyword == "[[":
            node = self._condition()
        elif self._is_next("(("):
            line = self.line
            self._place += 2
            node = Arithmetic(line, self._balanced("))", "(( is not closed"))
        elif self._is_next("("):
            self._place += 1
            node = ShellGroup(self._until(")"), is_subshell=True)
        elif keyword in _CLOSING:
            raise SyntaxProblem(self.line, f"has {keyword} without its opening keyword")
        else:
            return self._simple()
        while self._redirection()[0]:
            pass
        return node

    def _simple(self) -> Simple:
        """Assignments, words and redirections up to the end of a command."""
        line, assignments, tokens = self.line, list[Assignment](), list[Word]()
        document: Word | None = None
        while True:
            is_redirected, here_document = self._redirection()
            if is_redirected:
                document = here_document or document
                continue
            if self.at_end or self._text[self._place] in "\n;&|()":
                break
            may_assign = not tokens or tokens[0].plain in DECLARING
            assigned = _ASSIGNED.match(self._text, self._place) if may_assign else None
            if assigned is not None:
                self._place = assigned.end()
                assignments.append(self._assignment(assigned))
            else:
                tokens.append(self._word())
        return Simple(line, tuple(assignments), tuple(tokens), document)

    def _assignment(self, assigned: re.Match[str]) -> Assignment:
        line, (name, subscript, sign) = self.line, assigned.groups()
        is_array = self._is_next("(") and subscript is None
        if is_array:
            self._place += 1
            values = []
            while True:
                self._line_ends()
                if self._is_next(")"):
                    break
                before = self._place
                if not self.at_end:
                    values.append(self._word())
                if self._place == before:
                    raise SyntaxProblem(line, f"opens the array {name}, which is not closed")
            self._place += 1
        else:
            values = [self._word()]
        return Assignment(line, name, bool(sign), tuple(values), is_array, subscript is not None)

    def _redirection(self) -> tuple[bool, Word | None]:
        """Whether a redirection was read, and its here-document, if any."""
        self._blanks()
        match = _REDIRECTION.match(self._text, self._place)
        if match is None or self._text.startswith(("<(", ">("), match.start()):
            return False, None
        self._place = match.end()
        self._blanks()
        target, sign = self._word(), match[0].lstrip("0123456789")
        return True, self._document(target, sign == "<<-") if sign in ("<<", "<<-") else None

    def _document(self, target: Word, strips: bool) -> Word:
        """The here-document after the current line; the parser skips it when it reads the line end."""
        end = "".join(piece.text for piece in target.pieces if isinstance(piece, Text))
        line_end = self._text.find("\n", self._place)
        place, lines = (
            self._after_documents.get(line_end, line_end + 1) if line_end >= 0 else len(self._text),
            list[str](),
        )
        while True:
            if place >= len(self._text):
                raise SyntaxProblem(target.line, f"begins a here-document that {end!r} does not end")
            close = self._text.find("\n", place)
            close = len(self._text) if close < 0 else close
            content, place = self._text[place:close], close + 1
            if (content.lstrip("\t") if strips else content) == end:
                break
            lines.append(content)
        self._after_documents[line_end] = place
        text = "\n".join(lines)
        return Word(
            target.line,
            (Text(text),) if target.has_quotes else tuple(_Parser(text, target.line + 1)._quoted("")),
            has_quotes=True,
        )

    def _if(self) -> If:
        line = self.line
        branches: list[tuple[tuple[Node, ...] | None, tuple[Node, ...]]] = []
        keyword: str | None = "if"
        while keyword in ("if", "elif"):
            self._take(keyword)
            condition = self.commands(frozenset(("then",)))
            self._take("then", line)
            branches.append((condition, self.commands(frozenset(("elif", "else", "fi")))))
            keyword = self._keyword()
        if keyword == "else":
            self._take("else")
            branches.append((None, self.commands(frozenset(("fi",)))))
        self._take("fi", line)
        return If(line, tuple(branches))

    def _case(self) -> Case:
        line, branches = self.line, []
        self._take("case")
        self._blanks()
        value = self._word()
        self._line_ends()
        self._take("in", line)
        while True:
            self._line_ends()
            if self.at_end or self._keyword() == "esac":
                break
            if self._is_next("("):
                self._place += 1
            patterns = []
            while True:
                self._blanks()
                patterns.append(self._word())
                self._blanks()
                if not self._is_next("|"):
                    break
                self._place += 1
            if not self._is_next(")"):
                raise SyntaxProblem(self.line, f"has a branch of case without ) at {self.ahead}")
            self._place += 1
            branches.append((tuple(patterns), self.commands(frozenset((";;", "esac")))))
            if self._is_next(";;"):
                self._place += 3 if self._is_next(";;&") else 2
        self._take("esac", line)
        return Case(line, value, tuple(branches))

    def _loop(self, keyword: str) -> Loop:
        line, name = self.line, None
        self._take(keyword)
        if keyword in ("for", "select"):
            self._blanks()
            if self._is_next("(("):
                self._place += 2
                self._balanced("))", "(( is not closed")
            else:
                name = self._word().plain
        self.commands(frozenset(("do",)))
        self._take("do", line)
        body = self.commands(frozenset(("done",)))
        self._take("done", line)
        return Loop(line, name, body)

    def _condition(self) -> Condition:
        line, items = self.line, list[Word | str]()
        self._take("[[")
        while True:
            self._line_ends()
            if self.at_end:
                raise SyntaxProblem(line, "has [[ without ]]")
            if self._keyword() == "]]":
                self._take("]]")
                return Condition(line, tuple(items))
            operator = next((sign for sign in ("&&", "||", "(", ")", "<", ">") if self._is_next(sign)), None)
            if operator is not None:
                self._place += len(operator)
                items.append(operator)
            elif self._text[self._place] in ";&|":
                raise SyntaxProblem(line, "has [[ without ]]")
            elif self._keyword() == "!":
                self._take("!")
                items.append("!")
            else:
                last = items[-1] if items else None
                items.append(self._word(is_pattern=isinstance(last, Word) and last.plain == "=~"))

    def _until(self, close: str) -> tuple[Node, ...]:
        """The commands up to a closing bracket, and the bracket."""
        line = self.line
        body = self.commands(frozenset((close,)))
        if close == ")" and self._is_next(")"):
            self._place += 1
        else:
            self._take(close, line)
        return body

    # Words

    def _word(self, is_pattern: bool = False) -> Word:
        """A word up to a blank or an operator; an empty word if there is none.

        Args:
            is_pattern: whether it is a regular expression of `[[ =~ ]]`, which may contain operators and brackets.
        """
        pieces, line, has_quotes, begin = list[Piece](), self.line, False, self._place
        text, ends = self._text, frozenset(" \t\n") if is_pattern else _ENDS
        if text.startswith("~", begin) and text[begin + 1 : begin + 2] in ("", "/", " ", "\n"):
            pieces.append(Parameter("HOME", None, "", None, is_quoted=True))
            self._place += 1
        while not self.at_end:
            letter = text[self._place]
            if letter in "<>" and text.startswith("(", self._place + 1):
                self._place += 2
                pieces.append(Substitution(self._balanced(")", "<( is not closed")))
            elif letter in ends:
                break
            elif letter == "\\":
                has_quotes = has_quotes or not text.startswith("\\\n", self._place)
                pieces += self._escaped()
            elif letter == "'":
                has_quotes = True
                pieces.append(Text(self._upto("'")))
            elif letter == '"':
                has_quotes = True
                self._place += 1
                pieces += self._quoted()
            elif text.startswith("$'", self._place) or text.startswith('$"', self._place):
                self._place += 1
                if letter == "$" and text[self._place] == "'" and "\\" in self._ahead_to("'"):
                    pieces.append(Substitution(f"printf {self._upto(chr(39))}"))  # Escapes are not evaluated.
            elif letter in "$`":
                pieces.append(self._expansion(is_quoted=False))
            else:
                begin = self._place
                while not self.at_end and text[self._place] not in "\\'\"$`" and text[self._place] not in ends:
                    self._place += 1
                pieces.append(Text(text[begin : self._place]))
        return Word(line, tuple(pieces), has_quotes)

    def _escaped(self) -> list[Piece]:
        """The character after a backslash; a continued line adds nothing."""
        letter = self._text[self._place + 1 : self._place + 2]
        self._place += 2
        return [] if letter == "\n" else [Text(letter)]

    def _quoted(self, ends: str = '"') -> list[Piece]:
        """The content of double quotes, or with `}` the argument of `${NAME:-...}`; also reads the closing character.

        Args:
            ends: the closing character; "" for a here-document, which ends with the text and in which quotes are plain
                characters.
        """
        pieces, line = list[Piece](), self.line
        while True:
            begin = self._place
            while not self.at_end and self._text[self._place] not in "\\$`\"'}":
                self._place += 1
            if self._place > begin:
                pieces.append(Text(self._text[begin : self._place]))
            if self.at_end and not ends:
                return pieces
            if self.at_end:
                raise SyntaxProblem(line, f"opens {'a quotation' if ends == chr(34) else '${'} that is not closed")
            letter = self._text[self._place]
            if letter == ends:
                self._place += 1
                return pieces
            if letter == "\\":
                escaped = self._text[self._place + 1 : self._place + 2]
                pieces += [Text("\\")] if escaped not in '"$`\\\n}' else []
                pieces += self._escaped()
            elif letter in "$`":
                pieces.append(self._expansion(is_quoted=True))
            elif letter == "'" and ends == "}":
                pieces.append(Text(self._upto("'")))
            elif letter == '"' and ends == "}":
                self._place += 1
                pieces += self._quoted()
            else:
                pieces.append(Text(letter))
                self._place += 1

    def _expansion(self, is_quoted: bool) -> Piece:
        """The piece that begins with `$` or a backquote."""
        text, begin = self._text, self._place
        if text[begin] == "`":
            return Substitution(self._backquoted())
        if text.startswith("$((", begin):
            self._place += 3
            return Sum(self._balanced("))", "$(( is not closed"))
        if text.startswith("$[", begin):  # an older spelling of the same
            self._place += 2
            return Sum(self._balanced("]", "$[ is not closed"))
        if text.startswith("$(", begin):
            self._place += 2
            return Substitution(self._balanced(")", "$( is not closed"))
        if text.startswith("${", begin):
            self._place += 2
            return self._braced(is_quoted)
        name = _NAME.match(text, begin + 1)
        if name is None:
            self._place += 1
            return Text("$")
        # A shell reads $12 as $1 followed by 2.
        ends = begin + 2 if name[0].isdigit() else name.end()
        self._place = ends
        return Parameter(text[begin + 1 : ends], None, "", None, is_quoted)

    def _braced(self, is_quoted: bool) -> Parameter:
        """The content of `${...}`, and the closing bracket."""
        self._nested += 1
        if self._nested > MOST_NESTED:
            raise SyntaxProblem(self.line, f"is nested more than {MOST_NESTED} deep")
        prefix = self._text[self._place : self._place + 1]
        is_length = prefix == "#" and not self._is_next("#}")
        self._place += prefix == "!" or is_length
        name = _NAME.match(self._text, self._place)
        if name is None:
            raise SyntaxProblem(self.line, "has ${ without the name of a variable")
        self._place = name.end()
        subscript = None
        if self._is_next("["):
            close = self._text.find("]", self._place)
            if close < 0:
                raise SyntaxProblem(self.line, "opens ${ that is not closed")
            subscript, self._place = self._text[self._place + 1 : close], close + 1
        line = self.line
        if self._is_next("}"):
            self._place += 1
            operator, argument = "length" if is_length else "not followed" if prefix == "!" else "", None
        else:
            operator = next((sign for sign in OPERATORS if self._is_next(sign)), "not followed")
            self._place += len(operator) if operator in OPERATORS else 0
            argument = Word(line, tuple(self._quoted("}")), has_quotes=True)
        self._nested -= 1
        return Parameter(name[0], subscript, operator, argument, is_quoted)

    # Characters

    def _balanced(self, close: str, rule: str) -> str:
        """The text up to the closing bracket `close`, which is read as well; nested brackets and quotes are skipped."""
        begin, line, depth, text = self._place, self.line, 0, self._text
        while not self.at_end:
            letter = text[self._place]
            if letter == "\\":
                self._place += 2
            elif letter == "'":
                self._upto("'")
            elif letter == '"':
                self._place += 1
                while not self.at_end and text[self._place] != '"':
                    self._place += 2 if text[self._place] == "\\" else 1
                self._place += 1
            elif depth == 0 and text.startswith(close, self._place):
                content = text[begin : self._place]
                self._place += len(close)
                return content
            else:
                depth += (letter == "(") - (letter == ")")
                self._place += 1
        raise SyntaxProblem(line, rule)

    def _upto(self, quote: str) -> str:
        """The text between the quote at the current place and the next one."""
        close = self._text.find(quote, self._place + 1)
        if close < 0:
            raise SyntaxProblem(self.line, "opens a quotation that is not closed")
        content, self._place = self._text[self._place + 1 : close], close + 1
        return content

    def _backquoted(self) -> str:
        """The text between backquotes; a backslash escapes a backquote."""
        begin = self._place + 1
        for match in re.compile(r"\\.|`", re.DOTALL).finditer(self._text, begin):
            if match[0] == "`":
                self._place = match.end()
                return self._text[begin : match.start()]
        raise SyntaxProblem(self.line, "opens a backquote that is not closed")

    def _ahead_to(self, quote: str) -> str:
        """The text between the quote at the current place and the next one, without reading it; empty if there is no next one."""
        close = self._text.find(quote, self._place + 1)
        return self._text[self._place + 1 : close] if close >= 0 else ""

    def _is_next(self, text: str) -> bool:
        return self._text.startswith(text, self._place)

    def _keyword(self) -> str | None:
        """The word at the current place if it could be a keyword, without reading it."""
        match = _KEYWORD.match(self._text, self._place)
        if match is None or self._text[match.end() : match.end() + 1] not in ("", *_ENDS):
            return None
        return match[0]

    def _take(self, keyword: str, line: int | None = None) -> None:
        """Read a required keyword."""
        self._blanks()
        if self._keyword() != keyword:
            rule = f"lacks {keyword}" if line is None else f"begins a command that lacks {keyword}"
            raise SyntaxProblem(self.line if line is None else line, rule)
        self._place += len(keyword)

    def _blanks(self) -> None:
        """Skip blanks, line continuations with the comment lines after them, and a comment up to its line end."""
        text = self._text
        while True:
            while text.startswith((" ", "\t"), self._place):
                self._place += 1
            if text.startswith("\\\n", self._place):
                self._place += 2
                comments = _COMMENT_LINES.match(text, self._place)
                self._place = comments.end() if comments else self._place
            elif text.startswith("#", self._place):
                end = text.find("\n", self._place)
                self._place = len(text) if end < 0 else end
                return
            else:
                return

    def _line_ends(self) -> None:
        """Skip blanks, comments and line ends."""
        self._blanks()
        while self._is_next("\n"):
            self._line_end()
            self._blanks()

    def _line_end(self) -> None:
        """Read a line end and the here-documents after it."""
        self._place = self._after_documents.get(self._place, self._place + 1)
