#pragma once

#include <shardwise/mesh.h>

#include <ATen/DeviceAccelerator.h>
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

/// As given, or the other.
inline std::string value_or(const Arguments& given, const std::string& name, const std::string& other) {
  const auto found = given.find(name);
  return found == given.end() ? other : found->second;
}

/// `--device`: the CPU, unless told. `cuda` without a number: ranks take the GPUs in turn.
inline at::Device device_of(const Arguments& given) {
  const at::Device device(value_or(given, "--device", "cpu"));
  if (device.is_cpu() || device.has_index()) return device;
  return {device.type(), static_cast<at::DeviceIndex>(std::stoi(given.at("--rank")) % at::accelerator::deviceCount())};
}

/// `--rank`, `--world`, `--store`, a file that all ranks share, and the device.
inline shardwise::MeshOptions mesh_options(const Arguments& given) {
  const auto world = std::stoi(given.at("--world"));
  return shardwise::MeshOptions()
      .store(c10::make_intrusive<c10d::FileStore>(given.at("--store"), world))
      .rank(std::stoi(given.at("--rank")))
      .world_size(world)
      .device(device_of(given));
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
