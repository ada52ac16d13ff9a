from accelerate.tqdm import tqdm as tqdm
