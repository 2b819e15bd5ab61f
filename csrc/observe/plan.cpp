#include <shardwise/plan.h>

#include "files/json.h"
#include "observe/text.h"

#include <c10/util/StringUtil.h>

#include <utility>

namespace shardwise {
namespace {

using files::Json;
using observe::aligned;
using observe::megabytes;
using observe::Row;

/// "float32", or the dtypes for keeping, computing and summing if they differ.
std::string dtypes(const Plan::Group& group) {
  const bool same = group.compute_dtype == group.dtype && group.reduce_dtype == group.dtype;
  return same ? group.dtype : group.dtype + "/" + group.compute_dtype + "/" + group.reduce_dtype;
}

constexpr std::pair<const char*, int64_t Plan::Group::*> kNumbers[] = {
    {"parameters", &Plan::Group::parameters},
    {"elements", &Plan::Group::elements},
    {"bytes", &Plan::Group::bytes},
    {"shard_bytes", &Plan::Group::shard_bytes},
    {"padding_bytes", &Plan::Group::padding_bytes},
    {"full_bytes", &Plan::Group::full_bytes},
    {"bucket_bytes", &Plan::Group::bucket_bytes}};
constexpr std::pair<const char*, Plan::Traffic Plan::Group::*> kTraffic[] = {
    {"forward_gathers", &Plan::Group::forward_gathers},
    {"backward_gathers", &Plan::Group::backward_gathers},
    {"reduce_scatters", &Plan::Group::reduce_scatters},
    {"all_reduces", &Plan::Group::all_reduces}};

Plan::Traffic sent(const Plan::Group& group) {
  Plan::Traffic sum;
  for (const auto& [name, traffic] : kTraffic) sum += group.*traffic;
  return sum;
}

/// A group's columns, which follow its unit's.
Row columns(const Plan::Group& group, const std::string& dtype) {
  return {
      dtype,
      std::to_string(group.parameters),
      std::to_string(group.elements),
      megabytes(group.bytes),
      megabytes(group.shard_bytes),
      megabytes(group.padding_bytes),
      megabytes(group.full_bytes),
      megabytes(group.bucket_bytes),
      std::to_string(group.forward_gathers.calls) + "+" + std::to_string(group.backward_gathers.calls),
      std::to_string(group.reduce_scatters.calls),
      std::to_string(group.all_reduces.calls),
      megabytes(sent(group).bytes)};
}

void add(const Plan::Group& group, Plan::Group& sum) {
  for (const auto& [name, number] : kNumbers) sum.*number += group.*number;
  for (const auto& [name, traffic] : kTraffic) sum.*traffic += group.*traffic;
}

Json::Object json_of(const Plan::Traffic& traffic) {
  return {{"calls", traffic.calls}, {"bytes", traffic.bytes}};
}

Json::Object json_of(const Plan::Group& group) {
  Json::Object object{
      {"dtype", group.dtype},
      {"compute_dtype", group.compute_dtype},
      {"reduce_dtype", group.reduce_dtype},
      {"device", group.device},
      {"layout", group.layout}};
  for (const auto& [name, number] : kNumbers) object.emplace_back(name, group.*number);
  for (const auto& [name, traffic] : kTraffic) object.emplace_back(name, json_of(group.*traffic));
  return object;
}

Json::Object json_of(const Plan::Unit& unit) {
  Json::List axes;
  for (const auto& [name, size] : unit.axes) axes.emplace_back(Json::Object{{"name", name}, {"size", size}});
  Json::List groups;
  for (const auto& group : unit.groups) groups.emplace_back(json_of(group));
  return {
      {"name", unit.name},
      {"kind", unit.kind},
      {"axes", std::move(axes)},
      {"reshard", unit.reshard},
      {"groups", std::move(groups)}};
}

} // namespace

Plan::Traffic& Plan::Traffic::operator+=(const Traffic& other) {
  calls += other.calls;
  bytes += other.bytes;
  return *this;
}

std::string Plan::table() const {
  std::vector<Row> rows{
      {"unit", "kind", "layout", "reshard", "dtype", "parameters", "elements", "MB", "shard MB", "padding MB",
       "full MB", "bucket MB", "gathers", "scatters", "reduces", "sent MB"}};
  const auto add_row = [&](Row unit, Row group) {
    unit.insert(unit.end(), group.begin(), group.end());
    rows.push_back(std::move(unit));
  };
  Group sum;
  for (const auto& unit : units) {
    for (const auto& group : unit.groups) {
      add_row(
          {unit.name.empty() ? "(root)" : unit.name, unit.kind, group.layout, unit.reshard},
          columns(group, dtypes(group)));
      add(group, sum);
    }
  }
  add_row({"sum", "", "", ""}, columns(sum, ""));
  return c10::str(mesh, "\n", c10::Join("\n", aligned(rows)), "\n");
}

std::string Plan::json() const {
  Json::List all;
  for (const auto& unit : units) all.emplace_back(json_of(unit));
  return files::json_text(Json::Object{{"mesh", mesh}, {"units", std::move(all)}});
}

} // namespace shardwise
