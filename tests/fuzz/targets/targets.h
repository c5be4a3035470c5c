// What is fuzzed: each target takes any bytes and must neither crash nor break an invariant.
// fuzz_main.cc makes a libFuzzer binary of each (preset "fuzz"); corpus_test.cc runs the corpus
// through all of them in every build.
#ifndef MUSTER_TESTS_FUZZ_TARGETS_TARGETS_H_
#define MUSTER_TESTS_FUZZ_TARGETS_TARGETS_H_

#include <string>

namespace muster::fuzz {

// A job spec as YAML text, through the parser of the CLI. A spec that is accepted survives a round
// through ToYaml.
void SpecYaml(const std::string& bytes);
// A serialised JobSpec, through defaults and validation.
void SpecProto(const std::string& bytes);
// Session frames of two daemons (frames.h) in between submissions, restarts and time, through the
// coordinator's core.
void CoordinatorFrames(const std::string& bytes);
// Session frames of a coordinator, in between what ranks and the machine do, through the daemon's
// core.
void DaemonFrames(const std::string& bytes);
// A tokenizer.json. One that is accepted encodes and decodes any text, whole and cut.
void TokenizerJson(const std::string& bytes);
// The same for a tiktoken file.
void TiktokenRanks(const std::string& bytes);
// The same for a SentencePiece model.
void SentencePieceModel(const std::string& bytes);
// A line of JSON, whose field is read as a parser of all JSON reads it.
void JsonLine(const std::string& bytes);
// A topology file, as the coordinator's and as a daemon's. Workers of one that is accepted are an
// index of slots on which gangs are placed.
void TopologyFile(const std::string& bytes);
// What a caller shows and an operator writes: tokens, identity tokens, key sets, access files,
// certificates, revocation lists.
void CallerText(const std::string& bytes);

// What a daemon reads of ranks and of its operator's files: maps of accounts, references to
// secrets, progress of commands, what rank 0 tells the others, keys and certificates, arguments of
// a shim.
void WorkerText(const std::string& bytes);

// Queues as YAML text, through the parser and into a tree. What is accepted survives a round
// through QueuesToYaml.
void QueuePolicyYaml(const std::string& bytes);
// A serialised QueuePolicy, into a tree.
void QueuePolicyProto(const std::string& bytes);

}  // namespace muster::fuzz

#endif  // MUSTER_TESTS_FUZZ_TARGETS_TARGETS_H_
