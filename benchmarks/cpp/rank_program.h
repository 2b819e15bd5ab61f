#pragma once

#include <shardwise/mesh.h>

#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

// A program that is one rank: its arguments are pairs of a name and a value, it reads orders line by line, and answers
// each with a line of JSON.

using Arguments = std::map<std::string, std::string>;

/// `--rank`, `--world` and `--store`, a file that all ranks share; on the CPU.
inline shardwise::MeshOptions mesh_options(const Arguments& given) {
  const auto world = std::stoi(given.at("--world"));
  return shardwise::MeshOptions()
      .store(c10::make_intrusive<c10d::FileStore>(given.at("--store"), world))
      .rank(std::stoi(given.at("--rank")))
      .world_size(world)
      .device(at::Device(at::kCPU));
}

/// A line of /proc/self/status, in MiB.
inline double status_mib(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name + ":")) return std::stod(line.substr(name.size() + 1)) / 1024;
  }
  return 0;
}

/// The answer that tells that the rank waits for orders.
inline void say_ready() {
  std::cout << "{\"ready\": true}" << std::endl;
}

/// What main() returns. Runs on one thread; an error is printed.
inline int run_rank_program(int count, char** arguments, void (*run)(const Arguments&)) {
  try {
    Arguments given;
    for (int i = 1; i + 1 < count; i += 2) given[arguments[i]] = arguments[i + 1];
    torch::set_num_threads(1);
    run(given);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
